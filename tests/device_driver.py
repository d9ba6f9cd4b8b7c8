"""Decodes with target and drafter on devices of their own, in a process of its own; prints what came of it as JSON."""

import json

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from fake_device import TO_HOST, Devices, move, on
from keyed import sampled
from stubs import LAYER_TYPES, decode, greedy, make_drafter, make_target

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [0, 0, 0, 4, 33, 21, 60, 2, 9, 17]])
MASK = (PROMPT > 0).long()
NEW = 8
# Of the target, two where it is split in the middle, and of the drafter.
PLACES = {
    "drafter": (["cpu"], "away:0"),
    "target": (["away:0"], "cpu"),
    "both": (["away:0"], "away:1"),
    "half the target": (["away:0", "cpu"], "away:0"),
    "both halves": (["away:0", "away:1"], "cpu"),
}
SAMPLING = {"temperature": 0.8, "top_k": 0, "seed": 3}
# A drafter and how it is asked; sampling for some, so that noise meets drafts and processors run.
CASES = {
    "calibrated": (lambda target: make_drafter(target, transition_rank=4, depth_temperatures=[1.1] * 7), {}),
    "sliding": (lambda target: make_drafter(target, layer_types=LAYER_TYPES["mixed"], sliding_window=4), SAMPLING),
    "assistant": (lambda target: make_target("llama", seed=4), SAMPLING),
    "lookup": (lambda target: None, {"drafter": "lookup", "repetition_penalty": 1.2}),
}


def place(target, devices):
    """Puts the target where it shall be; if that is split, inputs follow as with accelerate's `dispatch_model`."""
    first, last = devices[0], devices[-1]
    move(target, last)
    if first == last:
        return
    blocks = dict.fromkeys((target.model.embed_tokens, *target.model.layers[:2]), first)
    blocks |= dict.fromkeys((*target.model.layers[2:], target.model.norm, target.lm_head), last)
    for block, device in {**blocks, target.model.rotary_emb: first}.items():
        move(block, device)
    for block, device in {**blocks, target: first}.items():
        hook = AlignDevicesHook(device, io_same_device=block is target, skip_keys=["cache", "past_key_values"])
        hook.init_hook = lambda module: module  # else it would move the weights itself
        add_hook_to_module(block, hook)


def run(places, case):
    """A call of two rows, one of them padded."""
    target = make_target("qwen3", seed=10)
    make, options = CASES[case]
    drafter, settings = make(target), {"attention_mask": MASK, "pad_token_id": 0}
    if "seed" in options:
        expected = sampled(target, PROMPT, NEW, **options, **settings)
        options = {**options, "do_sample": True}
    else:
        penalty = {name: value for name, value in options.items() if name != "drafter"}
        expected = greedy(target, PROMPT, NEW, **penalty, **settings)
    place(target, places[0])
    if drafter is not None:
        move(drafter, places[1])
    settings = {"attention_mask": on(MASK, places[0][0]), "pad_token_id": 0, "max_new_tokens": NEW}
    with Devices():
        ids = on(PROMPT, places[0][0])
        result = decode(target, drafter, ids, return_dict_in_generate=True, **options, **settings)
    return {
        "same": result.sequences.tolist() == expected.tolist(),
        "fallback_rounds": result.fallback_rounds,
        "device": str(result.sequences.device),
    }


def host_copies(length, budget):
    """A call of one row with all on one device: how often something is copied to the host, and what for."""
    target = make_target("qwen3", seed=10)
    ids = torch.randint(2, 64, (1, length), generator=torch.Generator().manual_seed(0))
    drafter = make_drafter(target)
    move(target, "away:0")
    move(drafter, "away:0")
    with Devices():
        TO_HOST.clear()
        options = {"max_new_tokens": NEW, "tree_budget": budget, "return_dict_in_generate": True}
        result = decode(target, drafter, on(ids, "away:0"), **options)
    return {"copies": TO_HOST.total(), "rounds": result.rounds, "tokens": NEW}


def outcome(function, *args):
    """What it returns, or the error."""
    try:
        return function(*args)
    except Exception as error:
        return repr(error)


if __name__ == "__main__":
    runs = {
        f"{places}, {case}": outcome(run, devices, case)
        for places, devices in PLACES.items()
        for case in CASES
        if not (places == "drafter" and case == "lookup")
    }
    copies = [outcome(host_copies, *sizes) for sizes in ((10, 4), (10, 64), (1000, 64))]
    print(json.dumps({"runs": runs, "host_copies": copies}))
