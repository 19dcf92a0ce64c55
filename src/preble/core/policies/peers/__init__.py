"""The placement rules of other projects, one module a project, to compare with on the same bookkeeping.

Most of these projects keep an approximate prefix tree of their own inserts, in characters, and count load in their own
process. Here every rule reads the one index and the one set of counts that E2 reads: prompts in flight count as held
from placement on, matches are whole KV blocks and never a prompt's last token, evictions and KV events are seen, and
ties are broken at random. A difference in results is then one of rules. Each class says what else departs.
"""
