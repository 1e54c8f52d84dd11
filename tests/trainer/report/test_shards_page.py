"""The page that the shard step shows."""

import re
from dataclasses import replace

from trainer.data.shard_folder import QuarantinedImage, read_index
from trainer.report.shards_page import render_shards_page


def test_it_shows_counts_plots_and_what_was_left_out_and_needs_no_other_file(shards):
    index = read_index(shards)
    categories = [replace(index.categories[0], name="<b> $x_1$"), *index.categories[1:]]
    quarantined = [QuarantinedImage("<script>.jpg", "cut off")]
    text = render_shards_page(replace(index, categories=categories, quarantined=quarantined))
    assert f"<title>Shards of {index.source}</title>" in text and index.source.startswith("sample:")
    assert text.count("<svg") == 4
    assert re.search(r"<td>train</td><td>24</td>\s*<td>\d+</td>", text)
    assert "&lt;script&gt;.jpg: cut off" in text and "<script>" not in text and "<b> $x" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text)
    # The table of classes: the most frequent in train first.
    of_class = index.statistics["train"].boxes_of_class
    shown = [int(count) for count in re.findall(r"<tr><td>[^<]*</td><td>(\d+)</td>", text)[3:]]
    assert shown[: len(of_class)] == sorted(of_class, reverse=True) and "<details open>" in text
