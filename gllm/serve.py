"""`python -m gllm.serve MODEL`: serve one pipeline over HTTP.

This process is the HTTP frontend and the parent of the workers. With --nnodes, the same command
runs on every machine: rank 0 is the head, which serves the API, and the others run its workers.
Exit status: 0 after SIGTERM or SIGINT, 1 if the engine failed, 2 for an invalid command line or a
model that cannot be served, 75 if an address, a name or the model hub is not available now.
"""

import argparse
import os
import sys
from dataclasses import replace

from gllm.commands.server_command import (
    build_server_parser,
    parse_command_line,
    read_server_config,
    report_error,
)
from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.join import JoinConfig
from gllm.config.node_environment import NodeRank, parse_head_address, read_node_rank
from gllm.config.nodes import NodesConfig
from gllm.config.server import ServerConfig
from gllm.deploy.ray.launcher import RayLauncher
from gllm.engine.preflight import ModelPlan, plan_model
from gllm.observability.logs import LogConfig
from gllm.options.addresses import format_host_port
from gllm.options.flags import config_from_flags
from gllm.options.ports import check_port_is_free
from gllm.recovery.node_layout import distribute_stages
from gllm.runtime.head.node import LocalNode


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm.serve`, with flags for engine, nodes and server."""
    description = "Serve a model over HTTP in OpenAI's API."
    configs = (EngineConfig, AttachmentConfig, NodesConfig)
    return build_server_parser("gllm serve", description, *configs)


def main(argv: list[str] | None = None) -> int:
    """Run an engine with its OpenAI-compatible server, until a signal or a failure of the engine.

    With `--node-rank` above 0 it runs the workers of that node, without a server.

    Returns:
        The exit status; see the docstring of the module.
    """
    values, logs = parse_command_line(make_parser(), argv, "gllm-frontend")
    try:
        engine_config = config_from_flags(EngineConfig, values)
        attachment = config_from_flags(AttachmentConfig, values)
        server_config = read_server_config(values)
        nodes = config_from_flags(NodesConfig, values)
        if nodes.distributed_executor_backend == "ray":
            plan_model(engine_config, nodes.nnodes)
            with RayLauncher(engine_config, nodes, attachment.node_secret_file, logs) as nodes:
                return _serve_head(engine_config, attachment, server_config, nodes, logs)
        place = read_node_rank(nodes, os.environ, engine_config.pipeline_parallel_size)
        if place.extra_process:
            print(
                f"gllm: {place.extra_process} marks an extra process of this machine, of which "
                "gllm needs one: it ends"
            )
            return 0
        nodes = _place_in(nodes, place)
        if attachment.hub is not None:
            check_port_is_free("--hub", attachment.hub)
        listen = nodes.node_listen or nodes.master_addr
        if place.is_head and nodes.nnodes > 1 and listen is not None:
            address = format_host_port(*parse_head_address(listen))
            check_port_is_free("--node-listen" if nodes.node_listen else "--master-addr", address)
        # Before the workers start, which takes seconds and memory.
        plan = plan_model(engine_config, nodes.nnodes)
        if not place.is_head:
            secret = attachment.node_secret_file
            return _run_node(engine_config, plan, nodes, secret, server_config)
        return _serve_head(engine_config, attachment, server_config, nodes, logs)
    except (ValueError, OSError) as error:
        return report_error(error, logs)


def _place_in(nodes: NodesConfig, place: NodeRank) -> NodesConfig:
    """Return the nodes with what the environment adds to the flags."""
    address = format_host_port(place.host, place.port) if place.host else None
    return replace(nodes, nnodes=place.num_nodes, node_rank=place.rank, master_addr=address)


def _count_own_workers(engine: EngineConfig, nodes: NodesConfig) -> int:
    """Return the number of workers that this machine starts with."""
    degrees = engine.stage_degrees
    owners = distribute_stages(degrees, nodes.nnodes, nodes.stages_per_node)
    return sum(n for n, node in zip(degrees, owners, strict=True) if node == nodes.node_rank)


def _run_node(
    engine: EngineConfig,
    plan: ModelPlan,
    nodes: NodesConfig,
    secret_file: str | None,
    server: ServerConfig,
) -> int:
    """Run this machine's part of an engine whose head is another one; return the exit status."""
    import uvloop

    from gllm.commands.node_process import NodeProcess, RankOptions
    from gllm.engine.preflight import make_join_facts, resolve_config

    resolved = resolve_config(engine, plan)
    facts = make_join_facts(resolved, plan.folder, plan.max_model_len)
    config = JoinConfig.of_rank(engine, nodes, server, secret_file)
    place = RankOptions(
        nodes.node_rank or 0,
        _count_own_workers(engine, nodes),
        facts.model_hash,
        facts.config,
        nodes.node_timeout,
    )
    return uvloop.run(NodeProcess(nodes.master_addr or "", config, place).run())


def _serve_head(
    engine: EngineConfig,
    attachment: AttachmentConfig,
    server: ServerConfig,
    nodes: NodesConfig,
    logs: LogConfig,
) -> int:
    """Start this machine's workers and serve; return the exit status.

    Raises:
        ValueError, OSError: the model, the configuration or an address cannot be used.
    """
    node = LocalNode(_count_own_workers(engine, nodes))
    try:
        # Imported after the workers have started, so that they import torch at the same time.
        import uvloop

        from gllm.engine.engine import Engine, EngineError
        from gllm.frontend.server import Server

        try:
            name, shows_progress = server.served_model_name, logs.format == "text"
            served = Engine(
                engine,
                name,
                logs,
                shows_progress,
                node,
                attachment,
                nodes,
                max_num_queued_requests=server.max_num_queued_requests,
            )
            return uvloop.run(Server(served, server).run())
        except EngineError as error:
            return report_error(error, logs, 1)
    finally:
        node.close()


if __name__ == "__main__":
    sys.exit(main())
