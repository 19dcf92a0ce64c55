"""Questions about long documents: a sentence, the document, the question (the paper's LooGLE).

Table 1, (mean, sd): prompt (23474, 6105), output (16, 9.9), shared (91 %, 24 %), key portion (94 %, 15 %), requests to
a key portion (18, 8.6). Made so. A whole document would always be 99.8 % of its prompt; 94 % and 15 % say that some
have much in common with another, as editions of one document have: here one in eight, 45 % of it. What it is in LooGLE
the paper does not tell.
"""

from __future__ import annotations

from preble.workloads.generators.shared_prefix import SharedPrefix
from preble.workloads.lengths import Lengths

LONGDOC = SharedPrefix(
    name="longdoc",
    noun="document",
    system_tokens=13,
    shared_tokens=Lengths("normal", 23_700, 6600, low=4000, high=32_700),
    uses=Lengths("normal", 18, 8.6),
    question_tokens=Lengths("normal", 45, 10, low=10, high=90),
    output_tokens=Lengths("gamma", 16, 9.9),
    related=0.12,
    common=0.45,
)
