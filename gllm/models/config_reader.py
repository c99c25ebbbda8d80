"""Reader of config.json that checks every value and leaves no key unread.

A model family reads the keys that it implements. A key that remains unread and is not known to be
harmless is an error that names the key, because it may change the arithmetic.
"""

from typing import Any, TypeVar

from gllm.models.errors import ModelError
from gllm.options.options import INT32_MAX

_DESCRIPTION = (
    "architectures model_type transformers_version auto_map custom_pipelines _name_or_path "
    "name_or_path tokenizer_class dtype torch_dtype bos_token_id eos_token_id pad_token_id "
    "sep_token_id unk_token_id forced_bos_token_id forced_eos_token_id decoder_start_token_id "
    "prefix use_cache return_dict torchscript is_decoder is_llama_config _from_model_config "
    "use_bfloat16 output_attentions output_hidden_states summary_type summary_use_proj "
    "summary_activation summary_proj_to_labels attn_implementation _attn_implementation "
    "_num_labels num_labels output_past max_sequence_length bos_token eos_token pad_token "
    "_attn_implementation_autoset unsloth_fixed unsloth_version transformers.js_config "
    "_flash_attn_2_enabled chunk_size_feed_forward id2label label2id problem_type "
    "task_specific_params"
)
"""Keys that describe a model, its tokens and its files, separated by spaces."""
_TRAINING = (
    "initializer_range init_std attention_dropout hidden_dropout dropout activation_dropout "
    "layerdrop attn_pdrop embd_pdrop resid_pdrop summary_first_dropout gradient_checkpointing "
    "output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux "
    "neftune_noise_alpha ep_size pretraining_tp z_loss_weight finetuning_task tf_legacy_loss"
)
"""Keys of the training: initialization, dropout, losses and distribution."""
_GENERATION = (
    "max_length min_length do_sample temperature top_k top_p typical_p repetition_penalty "
    "length_penalty diversity_penalty num_beams num_beam_groups no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size num_return_sequences early_stopping bad_words_ids "
    "suppress_tokens begin_suppress_tokens exponential_decay_length_penalty "
    "remove_invalid_values output_scores return_dict_in_generate"
)
"""Keys of generation defaults, which are in generation_config.json today."""
HARMLESS = frozenset(f"{_DESCRIPTION} {_TRAINING} {_GENERATION}".split())
"""Keys that do not change the results."""

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
    "qk_layer_norms": (False,),
    "qkv_bias": (False,),
    "rope_interleaved": (False,),
    "shared_expert_intermediate_size": (0,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Keys that some families read, with the values that are harmless in all others. Null is harmless
under any key."""

LAYER_COUNT_KEYS = ("num_hidden_layers", "num_layers", "n_layer")
"""Keys that count layers, which MAX_LAYERS limits."""
MAX_LAYERS = 10_000
"""Largest number of layers that is accepted."""
FLOAT32_MAX = 3.4028234663852886e38
"""Largest finite float32."""

Value = TypeVar("Value")


def is_finite(value: object) -> bool:
    """Return True if a value is a finite number that float32 can represent."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -FLOAT32_MAX <= value <= FLOAT32_MAX  # type: ignore[operator]


def _are_full_attention(types: object) -> bool:
    """Return whether layer_types lists layers with full attention only."""
    return isinstance(types, list) and bool(types) and set(map(str, types)) == {"full_attention"}


class ConfigReader:
    """Reads config.json with type checks; methods return a value by its key.

    Methods raise ModelError, which names the key. Null counts as unset, except in `boolean` and
    `optional_positive_float`, where transformers treats it as a value. Methods with several names
    read the first that is set: some families have renamed their keys.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        """Read from a parsed JSON object."""
        self._raw = raw
        self._read: set[str] = set()
        self._defaults: dict[str, Any] = {}
        self._own_names: dict[str, tuple[str, ...]] = {}

    def set_defaults(self, **values: Any) -> None:
        """Set the model family's defaults for absent keys; null remains unset."""
        self._defaults = values

    def rename(self, **names: str | tuple[str, ...]) -> None:
        """Read the family's own keys in place of usual ones; errors name the key of the file.

        names: by the usual name, the key or keys to read instead, in the order of `get`.
        """
        for usual, own in names.items():
            self._own_names[usual] = (own,) if isinstance(own, str) else own

    def key(self, *names: str) -> str:
        """Return which of these keys the file sets; all names if it sets none."""
        names = self._expand(names)
        present = (name for name in names if self._raw.get(name) is not None)
        return next(present, " or ".join(names))

    def _expand(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keys that are read for these names."""
        return tuple(own for name in names for own in self._own_names.get(name, (name,)))

    def default_of(self, name: str, default: Any) -> Any:
        """Return the model family's default for a key, for keys whose null means the default."""
        return self._defaults.get(name, default)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return a value unchecked."""
        names = self._expand(names)
        self._read.update(names)
        content = self._defaults | self._raw
        values = (content.get(name) for name in names)
        return next((value for value in values if value is not None), default)

    def has(self, name: str) -> bool:
        """Return whether a key is set."""
        return self.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether the file sets a key to null."""
        names = self._expand((name,))
        self._read.update(names)
        return any(name in self._raw and self._raw[name] is None for name in names)

    def positive_int(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(*names, default=default)
        limit = MAX_LAYERS if names[0] in LAYER_COUNT_KEYS else INT32_MAX
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(names, f"a positive integer up to {limit}", value)
        return value

    def positive_int_or_auto(self, name: str, auto: int) -> int:
        """Return a positive integer; `auto` if the key is absent or has the text "auto"."""
        value = self.get(name, default="auto")
        return auto if value == "auto" else self.positive_int(name)

    def uniform_int(self, *names: str, default: int) -> int:
        """Return a positive integer, which the file may have once for each layer."""
        value = self.get(*names, default=default)
        is_uniform = isinstance(value, list) and len(set(map(repr, value))) == 1
        number = value[0] if is_uniform else value
        if type(number) is not int or not 1 <= number <= INT32_MAX:
            raise self.error(names, "one positive integer for all layers", value)
        return number

    def non_negative_int(self, *names: str, default: int | None = None) -> int:
        """Return an integer that is 0 or more."""
        value = self.get(*names, default=default)
        if type(value) is not int or not 0 <= value <= INT32_MAX:
            raise self.error(names, "0 or a positive integer", value)
        return value

    def finite_float(self, *names: str, default: float | None = None) -> float:
        """Return a finite number."""
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
        """Return a positive number, None for null, or the default of an absent key."""
        if self.is_null(name):
            return None
        return (
            None
            if self.get(name, default=default) is None
            else self.positive_float(name, default=default)
        )

    def boolean(self, *names: str, default: bool = False) -> bool:
        """Return a boolean; null is False regardless of the default, as in transformers."""
        if any(map(self.is_null, names)):
            default = False
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise self.error(names, "true or false", value)
        return value

    def choice(self, name: str, table: dict[str, Value], default: str) -> Value:
        """Return the entry of a table that a string selects."""
        word = self.get(name, default=default)
        if not isinstance(word, str) or word not in table:
            raise ModelError(
                f"config.json: {name} {word!r:.80} is not implemented, only {', '.join(table)} are"
            )
        return table[word]

    def require_value(self, name: str, *allowed: Any) -> None:
        """Raise ModelError if a key is set to a value other than those allowed."""
        value = self.get(name)
        if value is not None and value not in allowed:
            good = " or ".join(repr(value) for value in allowed if value is not None) or "null"
            raise ModelError(
                f"config.json: {name} {value!r:.80} is not implemented, only {good:.200} is"
            )

    def flatten(self, name: str) -> None:
        """Replace an object of the file by its entries, whose keys become `name.entry`."""
        entries = self.get(name, default={})
        if not isinstance(entries, dict):
            raise self.error((name,), "an object", entries)
        self._raw = self._raw | {f"{name}.{key}": value for key, value in entries.items()}

    def ignore(self, *names: str) -> None:
        """Accept keys that have no effect for this model family."""
        self._read.update(names)

    def check_all_read(self) -> None:
        """Raise ModelError for a key that was not read, unless it cannot affect the results."""
        for name in sorted(self._raw.keys() - self._read - HARMLESS):
            value = self._raw[name]
            # Names that libraries write for themselves, such as _model_name_or_path.
            is_private = name.rpartition(".")[2].startswith("_") and isinstance(value, str)
            is_full = name == "layer_types" and _are_full_attention(value)
            if value is None or is_private or is_full:
                continue
            if name in HARMLESS_VALUES:
                self.require_value(name, *HARMLESS_VALUES[name])
                continue
            raise ModelError(
                f"config.json: key {name!r} ({value!r:.80}) is unknown and may change "
                "the arithmetic; if it does not, remove it from the file"
            )

    def error(self, names: tuple[str, ...], rule: str, value: object) -> ModelError:
        """Return the error for a value that violates a rule."""
        return ModelError(f"config.json: {self.key(*names)} is {value!r:.80}, but has to be {rule}")
