"""`kubedet serve`: try an exported model in a browser, or with a client of KServe or Triton."""

import argparse

from pipelines.commands import Commands
from pipelines.commands.options import add_inference, add_model, checked_pixel_limit
from pipelines.commands.parser import option
from trainer.base.errors import ConfigError


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "serve",
        description="Serve one model on this machine: a page that shows the detections in an image dropped "
        "on it, and the Open Inference Protocol v2 that clients of KServe and Triton speak. It is for trying "
        "a model, not for production: see `kubedet model layout` for that.",
    )
    add_model(parser)
    option(parser, "--host HOST", "address to listen at", "127.0.0.1")
    option(parser, "--port PORT", "port; 0 is any", 8080)
    option(
        parser, "--allow-host NAME...", "another host name of this server, as a proxy or a Service gives it, "
        "or a pattern such as *.example.org; repeat it for more. IP addresses, localhost and this machine's "
        "name need none", dest="names",
    )  # fmt: skip
    add_inference(parser)
    parser.set_defaults(command=_serve)


def _serve(options: argparse.Namespace) -> int:
    from trainer.export import published_models
    from trainer.export.predict import open_bundle

    try:
        from trainer.export.server import serve
    except ImportError as error:
        raise ConfigError(
            f"the server needs the package {error.name}, which is not installed",
            fix="pip install 'kubedet[serve]'",
        ) from None
    most_pixels = checked_pixel_limit(options)
    source = published_models.load(options.model, options.data_root)
    with open_bundle(source, options.kind, run_code=options.run_code) as model:
        serve(model, options.host, options.port, most_pixels, options.names)
    return 0
