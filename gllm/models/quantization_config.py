"""`quantization_config` of config.json: how a checkpoint stores its quantized weights.

One function per `quant_method`. Modules that are not quantized are recognized by their tensors, so
lists of them are ignored. Needs no torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec.model import QuantizationSpec

NAME = "quantization_config"
GPTQ_WIDTHS = (2, 3, 4, 8)
"""Bits of codes that are read of GPTQ and compressed-tensors."""
CALIBRATION = (
    "_name_or_path act_group_aware auto_scale autoround_version backend batch_size "
    "block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent data_type "
    "dataset disable_exllama do_fuse enable_alg_ext enable_full_range enable_minmax_tuning "
    "enable_norm_bias_tuning enable_quanted_input exllama_config fuse_max_seq_len "
    "gradient_accumulate_steps hyb_act iters low_gpu_mem_usage lr lr_scheduler "
    "max_input_length meta minmax_lr mock_quantization model_file_base_name "
    "model_name_or_path model_seqlen modules_in_block_to_quantize modules_to_fuse mse "
    "not_use_best_mse nsamples offload_to_disk pad_token_id provider quant_block_list "
    "quantizer sampler scale_dtype seqlen static_attention_granularity static_groups "
    "static_kv_granularity super_bits super_group_size supported_types to_quant_block_names "
    "tokenizer true_sequential use_cuda_fp16 use_exllama use_exllama_v2 v2 version_hash"
)
"""Keys of GPTQ, AWQ and AutoRound on calibration, and on kernels of their libraries."""
EXCLUSIONS = ("modules_to_not_convert", "ignored_layers", "lm_head", "quant_lm_head")
"""Keys on modules that are quantized or not, which the tensors show."""


def read_quantization(config: ConfigReader) -> QuantizationSpec | None:
    """Return the format of the checkpoint's quantized weights; None if there are none.

    Raises ModelError for an unsupported format.
    """
    given = config.get(NAME)
    if given is None:
        return None
    inside = _inside(NAME, given)
    methods = {
        "fp8": _fp8,
        "compressed-tensors": _compressed,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
        "auto-round": _auto_round,
        "auto_round": _auto_round,
    }
    read = inside.choice(f"{NAME}.quant_method", methods, default="")
    quantization = read(inside)
    inside.check_all_read()
    return quantization


def _inside(name: str, given: Any) -> ConfigReader:
    """Return a reader of a nested object; keys have their full names."""
    if not isinstance(given, dict):
        raise ModelError(f"config.json: {name} is {given!r:.80}, but has to be an object")
    return ConfigReader({f"{name}.{key}": value for key, value in given.items()})


def _fp8(config: ConfigReader) -> QuantizationSpec:
    """Read the format that DeepSeek, Qwen and transformers write."""
    config.require_value(f"{NAME}.fmt", "e4m3", "float8_e4m3fn")
    config.require_value(f"{NAME}.scale_fmt", "float", "ue8m0")
    config.require_value(f"{NAME}.expert_dtype", "fp8")
    # Quantization of activations, which is not applied.
    config.ignore(f"{NAME}.activation_scheme")
    # Instructions to transformers; the tensors' dtypes show which are quantized.
    config.ignore(f"{NAME}.dequantize", f"{NAME}.modules_to_convert")
    config.ignore(f"{NAME}.modules_to_not_convert", f"{NAME}.ignored_layers")
    config.require_value(f"{NAME}.kv_cache_scheme")
    return QuantizationSpec("fp8", _block(config, f"{NAME}.weight_block_size"))


def _mxfp4(config: ConfigReader) -> QuantizationSpec:
    """Read the format of gpt-oss, whose experts have a power of two per 32 inputs."""
    # The tensors show which modules are quantized.
    config.ignore(f"{NAME}.modules_to_not_convert", f"{NAME}.dequantize")
    return QuantizationSpec("mxfp4-pack-quantized", (1, 32), 4)


def _awq(config: ConfigReader) -> QuantizationSpec:
    """Read AWQ's format, with the layout of its GEMM kernels."""
    _ignore_calibration(config)
    config.require_value(f"{NAME}.bits", 4)
    config.require_value(f"{NAME}.w_bit", 4)
    config.require_value(f"{NAME}.version", "gemm", "GEMM")
    config.ignore(f"{NAME}.zero_point", f"{NAME}.sym")  # the stored zeros count
    group = _group_size(config, f"{NAME}.group_size", f"{NAME}.q_group_size")
    return QuantizationSpec("awq", group, 4)


def _gptq(config: ConfigReader) -> QuantizationSpec:
    """Read GPTQ's format: AutoGPTQ's, or GPTQModel's, which has zeros as they are."""
    _ignore_calibration(config)
    formats = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
    version = config.choice(f"{NAME}.checkpoint_format", formats, default="gptq")
    config.require_value(f"{NAME}.format", version)
    config.require_value(f"{NAME}.is_marlin_format", False)
    config.require_value(f"{NAME}.pack_dtype", "int32")
    config.ignore(f"{NAME}.sym")  # the stored zeros count
    _check_dynamic(config)
    has_act_order = config.boolean(f"{NAME}.desc_act")
    group = _group_size(config, f"{NAME}.group_size")
    return QuantizationSpec(version, group, _width(config), has_act_order and group is not None)


def _auto_round(config: ConfigReader) -> QuantizationSpec:
    """Read AutoRound's format: GPTQ's or AWQ's layout."""
    _ignore_calibration(config)
    config.require_value(f"{NAME}.data_type", "int")
    for activation in ("act_bits", "act_group_size", "act_data_type", "act_dynamic", "act_sym"):
        config.ignore(f"{NAME}.{activation}")
    if config.get(f"{NAME}.act_bits", default=16) < 16:
        raise config.error((f"{NAME}.act_bits",), "16", config.get(f"{NAME}.act_bits"))
    config.ignore(f"{NAME}.sym")  # the stored zeros count
    layouts = {
        "auto_round:auto_gptq": "gptq",
        "auto_gptq": "gptq",
        "auto_round:auto_awq": "awq",
        "auto_awq": "awq",
    }
    layout = config.choice(f"{NAME}.packing_format", layouts, default="")
    extra = config.get(f"{NAME}.extra_config", default={})
    for module, changes in extra.items() if isinstance(extra, dict) else ():
        width = changes.get("bits", 16) if isinstance(changes, dict) else None
        if width not in (16, 32):
            raise config.error(
                (f"{NAME}.extra_config",), "a list of modules with 16 bits", {module: changes}
            )
    group = _group_size(config, f"{NAME}.group_size")
    return QuantizationSpec(layout, group, _width(config, (4,) if layout == "awq" else GPTQ_WIDTHS))


def _ignore_calibration(config: ConfigReader) -> None:
    config.ignore(*(f"{NAME}.{key}" for key in (*CALIBRATION.split(), *EXCLUSIONS)))


def _check_dynamic(config: ConfigReader) -> None:
    """Raise ModelError if GPTQModel's rules give modules another format; "-:" excludes modules."""
    rules = config.get(f"{NAME}.dynamic", default={})
    if not isinstance(rules, dict) or any(not str(rule).startswith("-:") for rule in rules):
        raise config.error((f"{NAME}.dynamic",), "a table of modules to exclude (-:...)", rules)


def _width(config: ConfigReader, widths: tuple[int, ...] = GPTQ_WIDTHS) -> int:
    """Return the number of bits of a weight."""
    name = f"{NAME}.bits"
    width = config.positive_int(name)
    if width not in widths:
        raise config.error((name,), f"one of {', '.join(map(str, widths))}", width)
    return width


def _group_size(config: ConfigReader, *names: str) -> tuple[int, int] | None:
    """Return the block of one output and a group of inputs; None for -1: a scale per output."""
    size = config.get(*names)
    if size in (-1, 0) and size is not False:
        return None
    if type(size) is not int or size < 0 or (size != 16 and size % 32):
        raise config.error(names, "-1, 16 or a multiple of 32", size)
    return 1, size


def _compressed(config: ConfigReader) -> QuantizationSpec:
    """Read the format of llm-compressor: groups of modules, all in the same format."""
    config.require_value(f"{NAME}.format", *COMPRESSED_FORMATS)
    config.require_value(f"{NAME}.quantization_status", "compressed")
    config.require_value(f"{NAME}.kv_cache_scheme")
    config.require_value(f"{NAME}.sparsity_config", {}, {"format": "dense"})
    config.require_value(f"{NAME}.transform_config", {})
    config.ignore(f"{NAME}.ignore", f"{NAME}.global_compression_ratio", f"{NAME}.version")
    default = config.get(f"{NAME}.format", default="float-quantized")
    name = f"{NAME}.config_groups"
    given = config.get(name)
    groups = _inside(name, given)
    formats = {_group(f"{name}.{group}", groups.get(f"{name}.{group}"), default) for group in given}
    groups.check_all_read()
    if len(formats) != 1:
        raise ModelError(f"config.json: {name} has {len(formats)} kinds of weights, only 1 is read")
    return formats.pop()


def _group(name: str, given: Any, default: str) -> QuantizationSpec:
    """Return the format of a group of modules.

    Args:
        name: full name of the group.
        given: its object.
        default: format of groups that name none.
    """
    group = _inside(name, given)
    group.ignore(f"{name}.targets", f"{name}.input_activations")
    group.require_value(f"{name}.output_activations")
    group.require_value(f"{name}.format", *COMPRESSED_FORMATS)
    stored = str(group.get(f"{name}.format", default=default))
    path = f"{name}.weights"
    weights = _inside(path, group.get(path, default={}))
    group.check_all_read()
    kind, width = weights.get(f"{path}.type"), weights.get(f"{path}.num_bits")
    if stored == "naive-quantized":
        stored = "int-quantized" if kind == "int" else "float-quantized"
    rules = COMPRESSED_FORMATS[stored]
    if kind != rules["type"] or width not in rules["num_bits"]:
        widths = " or ".join(map(str, rules["num_bits"]))
        rule = f"of type {rules['type']} with num_bits {widths} in format {stored}"
        raise weights.error((path,), rule, group.get(path))
    weights.require_value(f"{path}.strategy", *rules["strategies"])
    if stored != "pack-quantized":
        weights.require_value(f"{path}.symmetric", True)
    weights.ignore(f"{path}.symmetric")  # the stored zeros count
    weights.require_value(f"{path}.dynamic", False)
    weights.ignore(f"{path}.observer", f"{path}.observer_kwargs")
    weights.ignore(f"{path}.scale_dtype", f"{path}.zp_dtype")
    order = _activation_order(weights, f"{path}.actorder", stored)
    if stored == "float-quantized":
        weights.require_value(f"{path}.group_size")
        block = _block(weights, f"{path}.block_structure")
        weights.check_all_read()
        return QuantizationSpec("fp8", block)
    weights.require_value(f"{path}.block_structure")
    is_grouped = weights.get(f"{path}.strategy") in GROUP_STRATEGIES
    block = _group_size(weights, f"{path}.group_size") if is_grouped else None
    weights.ignore(f"{path}.group_size")
    if rules["group_size"] not in (None, block):
        raise weights.error((f"{path}.group_size",), str(rules["group_size"][1]), block)
    weights.check_all_read()
    return QuantizationSpec(stored, block, width, order and block is not None)


GROUP_STRATEGIES = ("group", "tensor_group")
"""Strategies of compressed-tensors with a scale per group of inputs."""
COMPRESSED_FORMATS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "float-quantized": {
            "type": "float",
            "num_bits": (8,),
            "strategies": ("tensor", "channel", "block"),
        },
        "naive-quantized": {},
        "int-quantized": {
            "type": "int",
            "num_bits": (8,),
            "strategies": ("tensor", "channel"),
            "group_size": None,
        },
        "pack-quantized": {
            "type": "int",
            "num_bits": GPTQ_WIDTHS,
            "strategies": ("group", "channel"),
            "group_size": None,
        },
        "nvfp4-pack-quantized": {
            "type": "float",
            "num_bits": (4,),
            "strategies": GROUP_STRATEGIES,
            "group_size": (1, 16),
        },
        "mxfp4-pack-quantized": {
            "type": "float",
            "num_bits": (4,),
            "strategies": GROUP_STRATEGIES,
            "group_size": (1, 32),
        },
    }
)
"""Formats of compressed-tensors and what their weights have to be."""


def _activation_order(config: ConfigReader, name: str, stored: str) -> bool:
    """Return whether the inputs of a group are not neighbours."""
    if stored != "pack-quantized":
        config.require_value(name)
        return False
    # Inputs were sorted for calibration only in "weight" ("static").
    config.require_value(name, "weight", "static", "group", "dynamic", True, False)
    return config.get(name) in ("group", "dynamic", True)


def _block(config: ConfigReader, name: str) -> tuple[int, int] | None:
    """Return the outputs and inputs per block, or None without blocks."""
    given = config.get(name)
    if given is None:
        return None
    good = isinstance(given, list) and len(given) == 2
    if not good or not all(type(size) is int and size > 0 for size in given):
        raise config.error((name,), "a list of two positive integers", given)
    return given[0], given[1]
