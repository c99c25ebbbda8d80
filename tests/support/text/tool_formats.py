"""Tool calls as the models of each family write them: a row for each.

Owns the formats, written the other way round than the parsers read them.
"""

import json
from collections.abc import Callable
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]


def _json(value: Any) -> str:
    """As templates write it."""
    return json.dumps(value, ensure_ascii=False)


def _tagged(value: Any) -> str:
    """A value as templates write it between tags: strings as they are."""
    return value if isinstance(value, str) else _json(value)


def hermes(calls: Calls) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{_json(one)}\n</tool_call>" for one in objects)


def qwen3_coder(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        pairs = [(key, _tagged(value)) for key, value in arguments.items()]
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
        texts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(texts)


def glm45(calls: Calls, space: str = "\n") -> str:
    texts = []
    for name, arguments in calls:
        pairs = [(key, _tagged(value)) for key, value in arguments.items()]
        inner = "".join(
            f"<arg_key>{key}</arg_key>{space}<arg_value>{value}</arg_value>{space}"
            for key, value in pairs
        )
        texts.append(f"<tool_call>{name}{space}{inner}</tool_call>")
    return space.join(texts)


def glm47(calls: Calls) -> str:
    """Without line ends."""
    return glm45(calls, "")


def glm4(calls: Calls) -> str:
    return "\n".join(f"{name}\n{_json(arguments)}" for name, arguments in calls)


def llama3(calls: Calls) -> str:
    objects = [{"name": name, "parameters": arguments} for name, arguments in calls]
    return "; ".join(map(_json, objects))


def llama3_tag(calls: Calls) -> str:
    return "<|python_tag|>" + llama3(calls)


def mistral(calls: Calls) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS]{_json(objects)}"


def mistral_named(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(values)}" for name, values in calls)


def deepseek(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def deepseek31(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def deepseek_v32(calls: Calls, block: str = "function_calls") -> str:
    def parameter(key: str, value: Any) -> str:
        kind = "true" if isinstance(value, str) else "false"
        text = _tagged(value)
        return f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>\n'

    inner = "\n".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(parameter(*pair) for pair in arguments.items())
        + "</｜DSML｜invoke>"
        for name, arguments in calls
    )
    return f"<｜DSML｜{block}>\n{inner}\n</｜DSML｜{block}>"


def deepseek_v4(calls: Calls) -> str:
    return deepseek_v32(calls, "tool_calls")


def kimi_k2(calls: Calls) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def minimax_m2(calls: Calls) -> str:
    inner = "\n".join(
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{_tagged(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        + "</invoke>"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


def seed_oss(calls: Calls, convert: Callable[[Any], str] = _tagged) -> str:
    texts = []
    for name, arguments in calls:
        pairs = [(key, convert(value)) for key, value in arguments.items()]
        inner = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in pairs)
        texts.append(f"<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>")
    return "\n".join(texts)


def seed_oss_python(calls: Calls) -> str:
    """Values as the template converts them."""
    return seed_oss(calls, str)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{_gemma(key)}:{_gemma(each)}" for key, each in value.items()) + "}"
    return f"[{','.join(map(_gemma, value))}]" if isinstance(value, list) else _json(value)


def gemma4(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        inner = ",".join(f"{key}:{_gemma(value)}" for key, value in arguments.items())
        texts.append(f"<|tool_call>call:{name}{{{inner}}}<tool_call|>")
    return "".join(texts)


def gemma4_quoted(calls: Calls) -> str:
    """Keys are strings, as any key can be."""
    texts = (f"<|tool_call>call:{name}{_gemma(values)}<tool_call|>" for name, values in calls)
    return "".join(texts)


def lfm2(calls: Calls, convert: Callable[[Any], str] = _json) -> str:
    texts = [
        f"{name}({', '.join(f'{key}={convert(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"


def lfm2_python(calls: Calls) -> str:
    return lfm2(calls, repr)


def _list(calls: Calls) -> str:
    return _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def nemotron(calls: Calls) -> str:
    return f"<TOOLCALL>{_list(calls)}</TOOLCALL>"


def hunyuan_a13b(calls: Calls) -> str:
    return f"<tool_calls>{_list(calls)}</tool_calls>"


def granite(calls: Calls) -> str:
    return f"<|tool_call|>{_list(calls)}"


def apertus(calls: Calls) -> str:
    return f"<|tools_prefix|>{_json([dict([call]) for call in calls])}<|tools_suffix|>"


def cohere(calls: Calls) -> str:
    listed = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": arguments}
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{_json(listed)}<|END_ACTION|>"


def hy_v3(calls: Calls, suffix: str = "") -> str:
    texts = []
    for name, arguments in calls:
        inner = "".join(
            f"<arg_key{suffix}>{key}</arg_key{suffix}>\n"
            f"<arg_value{suffix}>{_tagged(value)}</arg_value{suffix}>\n"
            for key, value in arguments.items()
        )
        begin = f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n"
        texts.append(f"{begin}{inner}</tool_call{suffix}>\n")
    return f"<tool_calls{suffix}>\n{''.join(texts)}</tool_calls{suffix}>"


def hy_v3_opensource(calls: Calls) -> str:
    return hy_v3(calls, ":opensource")


def harmony(calls: Calls) -> str:
    """The marker behind a call ends an answer: it is seen only in front of another one."""
    texts = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        for name, arguments in calls
    ]
    return "<|call|><|start|>assistant".join(texts)


def harmony_role(calls: Calls) -> str:
    """With the recipient behind the role, as chat templates write it."""
    texts = [
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>"
        f"{_json(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "".join(texts)


FORMATS = [
    ("hermes", hermes),
    ("qwen3_coder", qwen3_coder),
    ("glm45", glm45),
    ("glm45", glm47),
    ("glm4", glm4),
    ("llama3", llama3),
    ("llama3", llama3_tag),
    ("mistral", mistral),
    ("mistral", mistral_named),
    ("deepseek", deepseek),
    ("deepseek", deepseek31),
    ("deepseek_v32", deepseek_v32),
    ("deepseek_v32", deepseek_v4),
    ("kimi_k2", kimi_k2),
    ("minimax_m2", minimax_m2),
    ("seed_oss", seed_oss),
    ("seed_oss", seed_oss_python),
    ("gemma4", gemma4),
    ("gemma4", gemma4_quoted),
    ("lfm2", lfm2),
    ("lfm2", lfm2_python),
    ("apertus", apertus),
    ("cohere", cohere),
    ("nemotron", nemotron),
    ("hunyuan_a13b", hunyuan_a13b),
    ("granite", granite),
    ("hy_v3", hy_v3),
    ("hy_v3", hy_v3_opensource),
    ("harmony", harmony),
    ("harmony", harmony_role),
]
"""A parser's name, and what writes calls for it."""

TAGGED = ["qwen3_coder", "glm45", "seed_oss", "minimax_m2", "deepseek_v32", "hy_v3"]
"""Formats with values between tags, whose types the schemas tell."""
LITERALS = ["gemma4", "lfm2"]
"""Formats with literals that are not JSON."""
BEFORE = "Let me see."
"""Content that may come before calls."""
SINGLE = {"harmony", "llama3"}
"""Formats in which a model writes one call per answer."""
FIRST_ONLY = {"llama3"}
"""Formats in which nothing may come before them."""
