"""The colouring streamer: the whole text, and each token by how it was accepted."""

import pytest
import torch
from stubs import greedy, make_stub, make_target, make_tokenizer

from hf_ddtree import DDTreeConfig
from hf_ddtree.acceptance import Accepted
from hf_ddtree.streaming import BONUS, BRANCH, PLAIN, SPINE, ColourStreamer
from hf_ddtree.tree import root_tree

PROMPT = torch.tensor([[7, 3, 44, 12, 9]])


def stream(kind, capsys, colour):
    target = make_target("llama")
    reference = greedy(target, PROMPT, 24)
    tokenizer = make_tokenizer()
    config = DDTreeConfig(tree_budget=32, max_new_tokens=16, do_sample=False)
    streamer = ColourStreamer(tokenizer, colour)
    target.generate(
        PROMPT, assistant_model=make_stub(target, kind, reference[0]), generation_config=config, streamer=streamer
    )
    return capsys.readouterr().out, tokenizer.decode(reference[0, 5:21])


def test_prints_the_whole_text(capsys):
    out, text = stream("rand", capsys, colour=False)
    assert out == text + "\n"


@pytest.mark.parametrize(
    ("kind", "seen"),
    [("oracle-1", {SPINE, BONUS}), ("oracle-2", {BRANCH, BONUS}), ("anti", {BONUS})],
)
def test_colours_say_where_a_token_came_from(kind, seen, capsys):
    out, _ = stream(kind, capsys, colour=True)
    counts = {colour: out.count(colour) for colour in (SPINE, BRANCH, BONUS)}
    assert {colour for colour, count in counts.items() if count} == seen
    assert sum(counts.values()) == 16
    assert out.endswith(PLAIN + "\n")


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids).decode(errors="replace")


def test_waits_for_the_rest_of_a_character(capsys):
    streamer = ColourStreamer(Bytes(), colour=False)
    for byte in "né😀!".encode():
        streamer.put_round(root_tree(torch.tensor([[0]])), Accepted([0], [byte], False))
    streamer.end()
    assert capsys.readouterr().out == "né😀!\n"
