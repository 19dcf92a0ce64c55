"""An answer that passes through the picker, without a gateway."""

from __future__ import annotations

import gc
import weakref

from preble.picker.answer import PickedAnswer
from preble.prompts.endpoints import endpoint_of


def test_an_answer_that_is_none_is_freed_without_a_garbage_collection() -> None:
    endpoint = endpoint_of("/v1/completions")
    assert endpoint is not None
    gc.disable()
    try:
        answer = PickedAnswer(endpoint, [], 200, {}, 1024)
        answer.feed(b"no JSON")
        answer.end()
        left = weakref.ref(answer)
        del answer
        assert left() is None
    finally:
        gc.enable()
