"""`DDTreeConfig`: the one argument that switches the strategy on."""

from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.utils import ExplicitEnum

from .compiled import MODES
from .noise import check_seed

# The fields that `DDTreeConfig` adds, with their defaults.
OWN_FIELDS: dict[str, Any] = {
    "drafter": None,
    "tree_budget": 32,
    "tree_shape": "best_first",
    "tree_top_k": None,
    "draft_block_size": None,
    "draft_noise_scale": None,
    "draft_temperature": None,
    "draft_transition": None,
    "draft_table": None,
    "draft_table_weight": 0.5,
    "draft_text_weight": 1.0,
    "acceptance": "walk",
    "seed": None,
    "compile": "auto",
    "synchronize_stages": False,
}
DRAFTERS = ("lookup",)
MOST_NODES = 256  # of a round whose budget is "auto"
# Not "quantized", whose entries can't be moved, nor "paged", which is another way to generate altogether.
CACHES = ("dynamic", "offloaded", *ALL_STATIC_CACHE_IMPLEMENTATIONS)
TREE_SHAPES = ("best_first", "chain")
# rule -> the tree shapes it can judge
ACCEPTANCE_RULES = {"walk": TREE_SHAPES, "token": ("chain",), "block": ("chain",), "recursive": ("best_first",)}


class DDTreeMode(ExplicitEnum):
    """The generation mode that `import hf_ddtree` registers with transformers."""

    DDTREE = "ddtree"


class DDTreeConfig(GenerationConfig):
    """A `GenerationConfig` whose generation mode is DDTree.

    Passed as `generation_config=` together with `assistant_model=`. Takes and keeps every field of `GenerationConfig`;
    saved and loaded like one, also through the base class, which keeps the fields but not the mode.

    Args:
        drafter: "lookup" drafts what followed the same words before, in the prompt or the output, and needs no model;
            None = what is given as `assistant_model`.
        tree_budget: nodes drafted per round, the root left out. 0 drafts nothing: plain decoding by the same loop.
            "auto" verifies in each round as many as pay, by the time that forwards take here, which is measured at
            first use (some seconds) and kept in the user's cache, and by what the round's drafts promise; where drafts
            don't pay, rounds are decoded plainly. In 16 bit near-ties may then fall differently from call to call.
        tree_shape: "best_first", the paper's tree, or "chain", the drafter's best token at each depth.
        tree_top_k: candidate tokens per depth, at most; None = `tree_budget`, which makes the tree exact; where drafts
            depend on their parents half of it, at least 32.
        draft_block_size: `draft_block_size - 1` is the greatest depth of a tree; a DFlash drafter's noise block, its
            anchor included. None = the block size it was trained with; 6 for other assistants, 33 for lookup.
        draft_noise_scale: how much of the target's sampling noise the draft's own choice gets, so that both prefer the
            same tokens; changes speed, never the text. 0 is the paper's tree. None = 0.9 for the walk (measured in
            docs/sampling.md; a greedy target has no noise), 0 for the other rules.
        draft_temperature: the drafts' log-probabilities are those of logits / `draft_temperature`; 1 is the paper's.
            None = 1 for the walk, or the drafter's calibrated temperatures where the tree is drafted without noise, and
            the target's temperature for the other rules, which draw the drafts.
        draft_transition: let drafts depend on their parent's token through the drafter's own transition, in best-first
            trees for the walk; None = if the drafter has one.
        draft_table: file of a bigram table that does the same with any drafter (`hf-ddtree table` makes one).
        draft_table_weight: of the table's values, which are added to the draft logits.
        draft_text_weight: the same by how often the text so far went on like that, logarithms of counts times this; 0
            is off. All three are measured in docs/training.md.
        acceptance: which drafts are committed. "walk": where the target's own choice, made with noise keyed by seed and
            position, is in the tree; the text depends on target and seed alone. For comparison, with sampling only, and
            with a text that depends on the drafter too: "token" (token-wise rejection of a drawn chain), "block" (block
            verification of one), "recursive" (recursive rejection on a tree drawn without replacement).
        seed: of all sampling noise; with the walk the same seed gives the same text, whatever the drafter, the budget
            or the tree, and every call uses the same noise. A list gives one seed per sequence. None = drawn from
            torch's default generator at each call.
        compile: how the forwards of rounds are run. "graphs": recorded as CUDA graphs and replayed. "inductor":
            compiled by torch.compile, which takes most of a minute once per process and model, and on a CPU keeps the
            weights a second time, laid out for its matrix products. "off": as they are. "auto": "graphs" on CUDA, else
            "off". Where it can't be done, forwards run as they are, with a warning.
        synchronize_stages: wait for the device at the end of each stage, so that `stage_seconds` are exact on an
            accelerator; costs speed.

    Raises:
        ValueError: a field is out of range, on construction and whenever fields are updated, which `generate` does
            with its keyword arguments.
    """

    def __init__(self, **kwargs: Any):
        for name, default in OWN_FIELDS.items():
            setattr(self, name, kwargs.pop(name, default))
        # Skips the library's check that the assistant has a tokenizer's worth of its own; reloaded through the base
        # class, the config runs the library's DFlash chain with the same drafter.
        kwargs.setdefault("speculation_type", "dflash")
        known = vars(GenerationConfig())
        for name in kwargs:  # the base class takes any name
            if name in known or name in UNSUPPORTED:
                continue
            if meant := get_close_matches(name, known, 1, cutoff=0.8) or get_close_matches(name, OWN_FIELDS, 1, 0.7):
                raise ValueError(f"`{name}` is no field of DDTreeConfig; did you mean `{meant[0]}`?")
        super().__init__(**kwargs)

    @classmethod
    def from_model_config(cls, model_config: Any) -> "DDTreeConfig":
        """As the base class's, with the tree's fields at their defaults."""
        return cls(**GenerationConfig.from_model_config(model_config).to_diff_dict())

    def get_generation_mode(self, assistant_model: Any = None) -> ExplicitEnum:
        """Always DDTree; transformers looks the decoding method up by it."""
        return DDTreeMode.DDTREE

    @property
    def most_nodes(self) -> int:
        """`tree_budget`, or what it never exceeds where it is "auto"."""
        return MOST_NODES if self.tree_budget == "auto" else self.tree_budget

    def candidates(self, budget: int) -> int:
        """Tokens that a tree of `budget` nodes may take from one depth."""
        if self.tree_shape == "chain":
            return 1
        return max(1, min(self.tree_top_k or budget, budget))

    @property
    def sampling_temperature(self) -> float:
        """The target's; 0 for greedy decoding."""
        if not self.do_sample:
            return 0.0
        return 1.0 if self.temperature is None else self.temperature

    @property
    def noise_scale(self) -> float:
        """`draft_noise_scale` or its default."""
        if self.draft_noise_scale is not None:
            return self.draft_noise_scale
        return 0.9 if self.acceptance == "walk" else 0.0

    @property
    def tree_temperature(self) -> float:
        """`draft_temperature` or its default."""
        if self.draft_temperature is not None:
            return self.draft_temperature
        return 1.0 if self.acceptance == "walk" else self.sampling_temperature

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Checks the base class's fields, then the tree's, then what the strategy cannot do."""
        super().validate(*args, **kwargs)
        _check_budget(self.tree_budget)
        _check_int("tree_top_k", self.tree_top_k, minimum=1, optional=True)
        _check_int("draft_block_size", self.draft_block_size, minimum=1, optional=True)
        _check_choice("tree_shape", self.tree_shape, TREE_SHAPES)
        if self.drafter is not None:
            _check_choice("drafter", self.drafter, DRAFTERS)
        _check_choice("compile", self.compile, MODES)
        _check_choice("acceptance", self.acceptance, tuple(ACCEPTANCE_RULES))
        _check_int("top_k", self.top_k, minimum=0, optional=True)
        if self.seed is not None:
            check_seed(self.seed)
        for name, (kinds, remedy) in KINDS.items():
            if not isinstance(value := getattr(self, name), kinds):
                raise ValueError(f"`{name}` is {value!r}; it must be {remedy}.")
        for name, (low, high, remedy) in RANGES.items():
            value = getattr(self, name, None)
            if value is not None and not _is_between(value, low, high):
                raise ValueError(f"`{name}` is {value!r}; {remedy}")
        if isinstance(temperature := getattr(self, "temperature", None), int):
            self.temperature = float(temperature)  # the library's warper takes no integer but 1
        for name, (accepted, remedy) in UNSUPPORTED.items():
            value = getattr(self, name, None)
            if value not in accepted:
                raise ValueError(f"`{name}={value!r}` does not go with DDTree decoding: {remedy}")
        self._check_acceptance()

    def _check_acceptance(self) -> None:
        """Raises ValueError where another field breaks what the acceptance rule needs to be exact."""
        rule = self.acceptance
        if self.tree_shape not in (shapes := ACCEPTANCE_RULES[rule]):
            raise ValueError(
                f'`acceptance="{rule}"` does not go with `tree_shape="{self.tree_shape}"`; set '
                f'`tree_shape="{shapes[0]}"`, or leave `acceptance` at "walk".'
            )
        if rule == "walk":
            return
        if self.tree_budget == "auto":
            raise ValueError(
                f'`tree_budget="auto"` does not go with `acceptance="{rule}"`, which judges the whole tree that was '
                'drawn; give a number, or leave `acceptance` at "walk".'
            )
        if self.draft_noise_scale:
            raise ValueError(
                f'`draft_noise_scale={self.draft_noise_scale}` does not go with `acceptance="{rule}"`, whose drafts '
                'must not know the target\'s noise; leave it unset, or leave `acceptance` at "walk".'
            )
        if self.tree_shape == "chain" and self.tree_top_k is not None:
            raise ValueError(
                f'`tree_top_k={self.tree_top_k}` does not go with `acceptance="{rule}"`, which draws from the '
                'drafter\'s whole distribution; leave it unset, or leave `acceptance` at "walk".'
            )


# field -> (values that mean "off", what to do instead)
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "leave it at 1, or use a plain `GenerationConfig` for beam search."),
    "use_cache": ((None, True), "the strategy needs the cache; leave it on."),
    "cache_implementation": (
        (None, *CACHES),
        f"set it to one of {', '.join(map(repr, CACHES))}; others can't be compacted.",
    ),
    "prompt_lookup_num_tokens": ((None,), 'leave it unset; `drafter="lookup"` does that with trees.'),
    "assistant_early_exit": ((None,), "leave it unset; the tree comes from `assistant_model`."),
    "use_mtp": ((None, False), "leave it unset; the tree comes from `assistant_model`."),
    "num_beam_groups": ((None, 1), "leave it unset, or use a plain `GenerationConfig` for beam search."),
    "force_words_ids": ((None,), "leave it unset, or use a plain `GenerationConfig` for constrained beam search."),
    "constraints": ((None,), "leave it unset, or use a plain `GenerationConfig` for constrained beam search."),
    "penalty_alpha": ((None, 0), "leave it unset; contrastive search is another strategy."),
    "dola_layers": ((None,), "leave it unset; DoLa is another strategy."),
}


# field -> (types, remedy)
KINDS: dict[str, tuple[Any, str]] = {
    "draft_transition": (bool | None, "True, False or None"),
    "draft_table": (str | None, "the path of a file, as a string"),
    "synchronize_stages": (bool, "True or False"),
}
# field -> (least, greatest, remedy); the library takes some of these silently
RANGES: dict[str, tuple[float, float, str]] = {
    # Scores over less than 1e-30 overflow float32.
    "temperature": (1e-30, 1e308, "it must be a number of at least 1e-30; for greedy decoding set `do_sample=False`."),
    "top_h": (5e-324, 1, "it must lie above 0 and be at most 1; leave it unset to turn it off."),
    "top_p": (0, 1, "it must lie between 0 and 1; 1 turns it off."),
    "min_p": (0, 1, "it must lie between 0 and 1; leave it unset to turn it off."),
    "typical_p": (5e-324, 1, "it must lie above 0 and be at most 1, which turns it off."),
    "epsilon_cutoff": (0, 1, "it must lie between 0 (off) and 1."),
    "eta_cutoff": (0, 1, "it must lie between 0 (off) and 1."),
    "draft_noise_scale": (0, 1e308, "it must be a number of 0 (no coupling) or more."),
    "draft_table_weight": (0, 1e308, "it must be a number of 0 (off) or more."),
    "draft_text_weight": (0, 1e308, "it must be a number of 0 (off) or more."),
    "draft_temperature": (5e-324, 1e308, "it must be a number above 0."),
}


def _is_between(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, choices))}.")


def _check_budget(value: Any) -> None:
    if value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f'`tree_budget` is {value!r}; it must be an integer of at least 0, or "auto".')


def _check_int(name: str, value: Any, minimum: int, optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        none = " or None" if optional else ""
        raise ValueError(f"`{name}` is {value!r}; it must be an integer of at least {minimum}{none}.")
