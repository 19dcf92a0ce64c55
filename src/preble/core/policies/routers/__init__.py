"""The placement rules of other projects, one module a project, to compare with on the same bookkeeping.

Most of these projects keep an approximate prefix tree of the prompts that they routed, in characters, and count load in
their own process. Here every rule reads the same index and counts as E2: prompts in flight count as cached from their
placement on, matches are whole KV blocks and never a prompt's last token, evictions and KV events are known, and ties
are broken at random. So a difference in results is a difference between rules. Each class lists its other departures.
"""
