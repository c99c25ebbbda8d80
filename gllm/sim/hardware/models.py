"""Table of model shapes by name."""

from gllm.sim.hardware.shapes import ExpertsShape, LatentShape, ModelShape


def _opt(layers: int, hidden: int, heads: int) -> ModelShape:
    """Return an OPT model: an MLP of four times the hidden size, one KV head per head."""
    return ModelShape(
        layers, hidden, heads, heads, 4 * hidden, 50272,
        head_dim=hidden // heads, tied=True, gated=False, positions=2050,
    )  # fmt: skip


MODELS = {
    "qwen2.5-0.5b": ModelShape(24, 896, 14, 2, 4864, 151936, head_dim=64, tied=True),
    "qwen2.5-7b": ModelShape(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": ModelShape(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": ModelShape(64, 5120, 40, 8, 27648, 152064),
    "qwen-72b": ModelShape(80, 8192, 64, 64, 24576, 152064),
    "llama-2-7b": ModelShape(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": ModelShape(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": ModelShape(80, 8192, 64, 8, 28672, 32000),
    "llama-30b": ModelShape(60, 6656, 52, 52, 17920, 32000),
    "llama-3-8b": ModelShape(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": ModelShape(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 28672, 128256),
    # The paper cuts layers off Llama-3.1-405B's shape until 100B parameters are left.
    "llama-100b": ModelShape(30, 16384, 128, 8, 53248, 128256),
    "codellama-34b": ModelShape(48, 8192, 64, 8, 22016, 32000),
    "internlm-20b": ModelShape(60, 5120, 40, 40, 13824, 103168),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "bloom-176b": ModelShape(70, 14336, 112, 112, 57344, 250880, tied=True, gated=False),
    "mixtral-8x7b": ModelShape(
        32, 4096, 32, 8, 14336, 32000, experts=ExpertsShape(8, 2, 14336)
    ),
    "deepseek-v2-lite": ModelShape(
        27, 2048, 16, 16, 10944, 102400,
        experts=ExpertsShape(64, 6, 1408, num_shared=2, num_dense_layers=1),
        latent=LatentShape(512, 64, 128, 128),
    ),
    "deepseek-v3": ModelShape(
        61, 7168, 128, 128, 18432, 129280, bytes_per_weight=1.0,
        experts=ExpertsShape(256, 8, 2048, num_shared=1, num_dense_layers=3),
        latent=LatentShape(512, 64, 128, 128, query_rank=1536),
    ),
}  # fmt: skip
"""Shapes from the models' configuration files; DeepSeek-V3's weights are fp8."""
