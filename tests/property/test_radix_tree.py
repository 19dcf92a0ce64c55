"""The radix tree against a naive set of prefixes, checked after every step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from preble.core.prefixes.radix_tree import Node, RadixTree, live_node
from preble.core.types import pack_tokens, unpack_tokens

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)
namespaces = st.sampled_from(["", "salted"])


def full_prefix(node: Node) -> tuple[int, ...]:
    runs = [node.tokens for node in node.ancestors()]
    return tuple(unpack_tokens(b"".join(reversed(runs))))


class RadixTreeMachine(RuleBasedStateMachine):
    """`self.prompts` is the naive model: the set of prompts that were inserted and not removed."""

    ends = Bundle("ends")

    def __init__(self) -> None:
        super().__init__()
        self.splits: list[tuple[Node, Node]] = []
        self.tree = RadixTree(on_split=lambda upper, lower: self.splits.append((upper, lower)))
        self.prompts: dict[str, set[tuple[int, ...]]] = {"": set(), "salted": set()}

    @rule(target=ends, prompt=prompts, namespace=namespaces)
    def insert(self, prompt: tuple[int, ...], namespace: str) -> tuple[Node, tuple[int, ...], str]:
        path = self.tree.insert(pack_tokens(prompt), namespace)
        self.prompts[namespace].add(prompt)
        assert full_prefix(path[-1]) == prompt
        assert path[-1].end == len(prompt)
        assert list(reversed(list(path[-1].ancestors()))) == path
        return path[-1], prompt, namespace

    @rule(end=ends, extra=prompts, cut=st.integers(0, 12))
    def insert_below(self, end: tuple[Node, tuple[int, ...], str], extra: tuple[int, ...], cut: int) -> None:
        node, prompt, namespace = end
        if prompt not in self.prompts[namespace] or live_node(node, len(prompt)).end < len(prompt):
            return  # it was removed, and perhaps inserted anew with other nodes
        num_tokens = max(1, min(cut, len(prompt)))
        base = live_node(node, num_tokens)
        path = self.tree.insert_below(base, num_tokens, pack_tokens(extra))
        assert full_prefix(path[-1]) == prompt[:num_tokens] + extra
        self.prompts[namespace].add(prompt[:num_tokens] + extra)

    @rule(prompt=prompts, namespace=namespaces)
    def match(self, prompt: tuple[int, ...], namespace: str) -> None:
        match = self.tree.match(pack_tokens(prompt), namespace)
        expected = max(
            (
                next((i for i, (a, b) in enumerate(zip(p, prompt, strict=False)) if a != b), min(len(p), len(prompt)))
                for p in self.prompts[namespace]
            ),
            default=0,
        )
        assert match.num_tokens == expected
        assert all(node.start < match.num_tokens for node in match.path)

    @rule(end=consumes(ends))
    def remove(self, end: tuple[Node, tuple[int, ...], str]) -> None:
        node, prompt, namespace = end
        node = live_node(node, len(prompt))
        longer = [p for p in self.prompts[namespace] if p != prompt and p[: node.end] == prompt[: node.end]]
        if prompt not in self.prompts[namespace] or node.children or longer or node.end != len(prompt):
            return
        kept = node.start
        inside = {p for p in self.prompts[namespace] if kept < len(p) and prompt[: len(p)] == p}
        self.tree.remove(node)
        self.prompts[namespace] -= inside
        if kept:
            self.prompts[namespace].add(prompt[:kept])
            assert full_prefix(live_node(node, kept))[:kept] == prompt[:kept]

    @rule(end=ends)
    def merge(self, end: tuple[Node, tuple[int, ...], str]) -> None:
        node, prompt, namespace = end
        if prompt not in self.prompts[namespace] or live_node(node, len(prompt)).end < len(prompt):
            return  # it was removed, and perhaps inserted anew with other nodes
        for candidate in live_node(node, len(prompt)).ancestors():
            if candidate.children is not None and len(candidate.children) == 1:
                self.tree.merge(candidate)
                break
        for num_tokens in range(1, len(prompt) + 1):
            live = live_node(node, num_tokens)
            assert live.start < num_tokens <= live.end

    @invariant()
    def structure_holds(self) -> None:
        self.tree.check()
        for upper, lower in self.splits:
            assert upper is not lower
        stored = {full_prefix(node) for node in self.tree.nodes()}
        for known in self.prompts.values():
            for prompt in known:
                assert any(prefix[: len(prompt)] == prompt for prefix in stored)


RadixTreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRadixTree = RadixTreeMachine.TestCase
