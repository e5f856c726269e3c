"""Settings of a deployment on several machines or in two roles: what must agree before any of them is started."""

from __future__ import annotations

from k3_sglang.config import TextConfig
from k3_sglang.launch.planner.layout import Layout, layout_problems
from k3_sglang.launch.settings import LaunchSettings, SettingsError


def check_deployment(settings: LaunchSettings) -> None:
    """Refuse a place in a deployment that there is not, or one that the others could not find.

    Raises:
        SettingsError: naming the setting and what to do.
    """
    nodes, rank, address = settings.nodes, settings.node_rank, settings.dist_init_addr
    if rank >= nodes:
        raise SettingsError(f"node_rank is {rank}; with nodes {nodes} it must be from 0 to {nodes - 1}")
    if nodes > 1 and address is None:
        raise SettingsError(f"nodes is {nodes}, but dist_init_addr is not set; give HOST:PORT of the first machine")
    if nodes == 1 and address is not None:
        raise SettingsError(f"dist_init_addr is {address!r}, but nodes is 1; leave it out or say how many there are")
    if address is not None:
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise SettingsError(f"dist_init_addr is {address!r}; it must be HOST:PORT, for instance 10.0.0.1:20000")
    role, router = settings.disaggregation, settings.router_url
    if role == "decode" and router is None:
        raise SettingsError(
            "disaggregation is 'decode', but router_url is not set; the gateway has to send requests to the router, "
            "which gives each to an engine of either role"
        )
    if router is not None and not router.startswith(("http://", "https://")):
        raise SettingsError(f"router_url is {router!r}; it must be the URL of SGLang's router, http://HOST:PORT")
    if role == "prefill" and router is not None:
        raise SettingsError(f"router_url is {router!r}, but disaggregation is 'prefill', which runs no gateway")


def check_layout(settings: LaunchSettings, text: TextConfig) -> None:
    """Refuse groups of ranks that do not come out even for this model.

    Raises:
        SettingsError: the first thing that does not, and what is allowed.
    """
    layout = Layout(
        tp=settings.tp,
        pp=settings.pp,
        ep=settings.ep,
        attn_dp=settings.attn_dp,
        dcp=settings.dcp,
        nodes=settings.nodes,
    )
    for problem in layout_problems(layout, text):
        raise SettingsError(problem)
