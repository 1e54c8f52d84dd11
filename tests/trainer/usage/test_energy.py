"""What the machine's counters of energy tell: RAPL's as files of a made tree, NVML's as a made library."""

import pytest

from trainer.usage.energy import Gpus, Processors, visible_gpus

RANGE = 262_143_328_850


def zone(root, number, name, microjoules, *, largest=RANGE):
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{largest}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")


def test_the_processors_and_their_memory_are_added_and_their_parts_are_not(tmp_path):
    zone(tmp_path, "0", "package-0", 1_000_000)
    zone(tmp_path, "1", "package-1", 5_000_000)
    zone(tmp_path, "0:0", "core", 0)
    zone(tmp_path, "0:1", "dram", 100)
    zone(tmp_path, "2", "psys", 0)
    processors = Processors(tmp_path)
    assert processors.joules() == 0
    zone(tmp_path, "0", "package-0", 3_000_000)
    zone(tmp_path, "1", "package-1", 5_500_000)
    zone(tmp_path, "0:0", "core", 9_000_000)
    zone(tmp_path, "0:1", "dram", 250_100)
    zone(tmp_path, "2", "psys", 9_000_000)
    assert processors.joules() == pytest.approx(2.75)


def test_a_counter_that_begins_anew_goes_on(tmp_path):
    zone(tmp_path, "0", "package-0", RANGE - 1_000_000)
    processors = Processors(tmp_path)
    zone(tmp_path, "0", "package-0", 2_000_000)
    assert processors.joules() == pytest.approx(3)
    zone(tmp_path, "0", "package-0", 2_500_000)
    assert processors.joules() == pytest.approx(3.5)


def test_what_cannot_be_read_is_unknown_and_not_nothing(tmp_path):
    assert Processors(tmp_path / "none").joules() is None
    zone(tmp_path, "0", "package-0", 0)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()  # as it is for whoever is not root
    assert Processors(tmp_path).joules() is None


def test_a_counter_that_is_lost_on_the_way_leaves_no_part_of_a_sum(tmp_path):
    zone(tmp_path, "0", "package-0", 0)
    zone(tmp_path, "1", "package-1", 0)
    processors = Processors(tmp_path)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    zone(tmp_path, "0", "package-0", 1_000_000)
    assert processors.joules() is None
    assert processors.joules() is None


class Nvml:
    """As much of libnvidia-ml.so.1 as is asked: two GPUs, whose counters are in millijoules."""

    def __init__(self, begins=0):
        self.begins, self.used, self.refuses = begins, {"0": 1000, "1": 2000, "GPU-abc": 3000}, False

    def nvmlInit_v2(self):
        return self.begins

    def nvmlDeviceGetHandleByIndex_v2(self, number, handle):
        handle._obj.value = number.value + 1
        return 0 if number.value < 2 else 2

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        handle._obj.value = 3
        return 0 if name == b"GPU-abc" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):
        value._obj.value = list(self.used.values())[handle.value - 1]
        return 3 if self.refuses else 0


@pytest.mark.parametrize(("names", "joules"), [(["0"], 5.0), (["0", "1"], 12.5), (["GPU-abc"], 1.0)])
def test_the_gpus_that_are_meant_are_added(names, joules):
    library = Nvml()
    gpus = Gpus(names, library)
    library.used = {"0": 6000, "1": 9500, "GPU-abc": 4000}
    assert gpus.joules() == joules


def test_no_gpu_uses_nothing_and_asks_nobody():
    assert Gpus([], None).joules() == 0


def test_a_driver_a_gpu_or_a_library_that_does_not_tell_is_unknown():
    assert Gpus(["0"], Nvml(begins=9)).joules() is None
    assert Gpus(["7"], Nvml()).joules() is None
    assert Gpus(["MIG-1"], Nvml()).joules() is None
    assert Gpus(["0"], object()).joules() is None
    old = Nvml()
    old.refuses = True
    assert Gpus(["0"], old).joules() is None
    anew = Nvml()
    gpus = Gpus(["0"], anew)
    anew.used["0"] = 10  # its driver was loaded again
    assert gpus.joules() is None


@pytest.mark.parametrize(
    ("chosen", "names"),
    [(None, ["0", "1"]), ("1", ["1"]), ("", []), ("-1,0", []), ("0,5,1", ["0"]), ("GPU-abc", ["GPU-abc"])],
)
def test_the_gpus_of_a_process_are_those_that_cuda_sees(tmp_path, chosen, names):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path, {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == names


def test_without_devices_there_is_no_gpu_and_of_others_nobody_knows(tmp_path):
    assert visible_gpus(tmp_path, {}) == []
    (tmp_path / "kfd").touch()
    assert visible_gpus(tmp_path, {}) is None
