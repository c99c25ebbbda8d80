"""The keys of a config.json, read with checks.

Owns the law that nothing is ignored in silence: a family reads the keys it computes, and what
is left unread at the end and not known to be harmless is refused by name, so that no model is ever
computed wrongly. Knows nothing of what keys mean.
"""

from typing import Any, TypeVar

from gllm.config.options import INT32_MAX
from gllm.models.errors import ModelError

HARMLESS = {
    *("architectures", "model_type", "transformers_version", "auto_map", "custom_pipelines"),
    *("_name_or_path", "name_or_path", "tokenizer_class", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id", "prefix"),
    *(
        "use_cache",
        "return_dict",
        "torchscript",
        "is_decoder",
        "is_llama_config",
        "_from_model_config",
    ),
    *("initializer_range", "init_std", "use_bfloat16", "output_attentions", "output_hidden_states"),
    *("attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "layerdrop"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_type", "summary_use_proj"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("attn_implementation", "_attn_implementation", "_num_labels", "num_labels", "output_past"),
    *("gradient_checkpointing", "max_sequence_length", "bos_token", "eos_token", "pad_token"),
    *("_attn_implementation_autoset", "unsloth_fixed", "unsloth_version", "transformers.js_config"),
    *("chunk_size_feed_forward", "id2label", "label2id", "problem_type", "task_specific_params"),
    # Of the training's loss and of how it was distributed.
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha"),
    *("seq_aux", "ep_size", "pretraining_tp", "z_loss_weight", "finetuning_task", "tf_legacy_loss"),
    # Of generation, which has a file of its own today.
    *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p"),
    *("repetition_penalty", "length_penalty", "diversity_penalty", "num_beams", "num_beam_groups"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences"),
    *("early_stopping", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("exponential_decay_length_penalty", "remove_invalid_values", "output_scores"),
    *("return_dict_in_generate",),
}
"""Keys that change nothing of what is computed here."""

HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "num_nextn_predict_layers": (0,),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({},),
    "qkv_bias": (False,),
    "rope_interleaved": (False,),
    "shared_expert_intermediate_size": (0,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Keys of some families with the values that ask for nothing in a family that does not read them.
Null asks for nothing under any key."""

LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
MAX_LAYERS = 10_000
FLOAT32_MAX = 3.4028234663852886e38

Value = TypeVar("Value")


def is_finite(value: object) -> bool:
    """Return whether a value is a number that float32 can hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -FLOAT32_MAX <= value <= FLOAT32_MAX  # type: ignore[operator]


def _are_full(types: object) -> bool:
    """Return whether layer_types names layers that see all tokens."""
    return isinstance(types, list) and bool(types) and set(map(str, types)) == {"full_attention"}


class ConfigReader:
    """The object of a config.json. Methods raise ModelError that names the key.

    Null is unset, but for `flag` and `optional_number`, where transformers takes it for a value.
    Where a method takes several names, the first that is set counts: some families have renamed
    their keys.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self._read: set[str] = set()
        self._assumed: dict[str, Any] = {}

    def set_defaults(self, **values: Any) -> None:
        """What keys stand for in a family where a file does not have them; null is still unset."""
        self._assumed = values

    def default_of(self, name: str, default: Any) -> Any:
        """Return what an absent key stands for, for keys whose null stands for the same."""
        return self._assumed.get(name, default)

    def get(self, *names: str, default: Any = None) -> Any:
        """A value as it is."""
        self._read.update(names)
        found = self._assumed | self._raw
        values = (found.get(name) for name in names)
        return next((value for value in values if value is not None), default)

    def has(self, name: str) -> bool:
        """Whether a key is set."""
        return self.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether the file has a key with null."""
        self._read.add(name)
        return name in self._raw and self._raw[name] is None

    def positive_int(self, *names: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(*names, default=default)
        most = MAX_LAYERS if names[0] in LAYERS else INT32_MAX
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(names, f"a positive integer up to {most}", value)
        return value

    def non_negative_int(self, *names: str, default: int | None = None) -> int:
        """Return an integer from 0 on."""
        value = self.get(*names, default=default)
        if type(value) is not int or not 0 <= value <= INT32_MAX:
            raise self.error(names, "0 or a positive integer", value)
        return value

    def finite_float(self, *names: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(*names, default=default)
        if not is_finite(value):
            raise self.error(names, "a finite number", value)
        return float(value)

    def positive_float(self, *names: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.finite_float(*names, default=default)
        if value <= 0:
            raise self.error(names, "a finite number above 0", value)
        return value

    def optional_positive_float(self, name: str, default: float | None = None) -> float | None:
        """Return a positive number, None where the file has null, the default where it has none."""
        if self.is_null(name):
            return None
        return (
            None
            if self.get(name, default=default) is None
            else self.positive_float(name, default=default)
        )

    def boolean(self, *names: str, default: bool = False) -> bool:
        """Return true or false; null is false whatever the default, as in transformers."""
        if any(map(self.is_null, names)):
            default = False
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise self.error(names, "true or false", value)
        return value

    def choice(self, name: str, table: dict[str, Value], default: str) -> Value:
        """What a word stands for."""
        word = self.get(name, default=default)
        if not isinstance(word, str) or word not in table:
            raise ModelError(
                f"config.json: {name} {word!r:.80} is not implemented, only {', '.join(table)} are"
            )
        return table[word]

    def require_value(self, name: str, *allowed: Any) -> None:
        """Refuse a key that has another value than those; unset is allowed."""
        value = self.get(name)
        if value is not None and value not in allowed:
            good = " or ".join(repr(value) for value in allowed if value is not None) or "null"
            raise ModelError(
                f"config.json: {name} {value!r:.80} is not implemented, only {good} is"
            )

    def ignore(self, *names: str) -> None:
        """Keys that say nothing in this family."""
        self._read.update(names)

    def check_all_read(self) -> None:
        """Refuse what nobody has read, unless it is harmless."""
        for name in sorted(self._raw.keys() - self._read - HARMLESS):
            value = self._raw[name]
            if value is None or (name == "layer_types" and _are_full(value)):
                continue
            if name in HARMLESS_VALUES:
                self.require_value(name, *HARMLESS_VALUES[name])
                continue
            raise ModelError(
                f"config.json: key {name!r} ({value!r:.80}) is unknown and may change "
                "the arithmetic; if it does not, remove it from the file"
            )

    def error(self, names: tuple[str, ...], rule: str, value: object) -> ModelError:
        """The error for a value that breaks a rule."""
        given = [name for name in names if self._raw.get(name) is not None]
        name = given[0] if given else " or ".join(names)
        return ModelError(f"config.json: {name} is {value!r:.80}, but has to be {rule}")
