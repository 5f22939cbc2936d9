"""``fl p2p-proxy``: the HTTP server in front of vLLM engines that hand KV caches to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fl_dispatch.errors import ConfigError


def p2p_proxy(
    host: Annotated[str, typer.Option(help="Address of both ports; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for clients of OpenAI's API.")] = 10001,
    proxy_port: Annotated[int, typer.Option(help="Port for the engines' heartbeats: their 'proxy_port'.")] = 30001,
    secret_file: Annotated[
        Path | None, typer.Option(help="The engines' 'secret_file'; heartbeats without its secret are dropped.")
    ] = None,
    read_within: Annotated[
        float, typer.Option(help="Seconds that an engine may take for a prompt before another engine gets it.", min=1)
    ] = 300.0,
) -> None:
    """Send each request to a prefill engine for its prompt, then to a decode engine for the answer.

    docs/guide/commands/p2p.md has the whole setup. Engines come and go with their heartbeats; GET /health lists them.
    """
    from ..protocol.secret import Secret
    from .server import serve

    secret = Secret(secret_file, "fl p2p-proxy")
    typer.echo(f"clients: http://{host}:{port}, heartbeats: {host}:{proxy_port}")
    try:
        serve(host, port, proxy_port, secret, read_within)
    except OSError as error:
        raise ConfigError("fl p2p-proxy", None, f"{error}; --port and --proxy-port choose others") from error
