"""Lists the mutants of the Lua scripts that are equivalent to the original, each with the reason.

Mutants are listed by `lua_mutants.Mutant.name`, which does not change when a line moves.
"""

from __future__ import annotations

_BY_REASON = {
    "nil cannot be unpacked, just as any string that is not a record": """
continuation: local state, attempt, token, at, fingerprint, task_id, worker, owner, format, position = unpack_record(raw or '')  ⟶  raw or '' becomes raw
continuation: local state, attempt, token, at, fingerprint, task_id, worker, owner, format, position = unpack_record(raw or '')  ⟶  '' becomes '?'
abandon: unpack_record(raw or '')  ⟶  raw or '' becomes raw
abandon: unpack_record(raw or '')  ⟶  '' becomes '?'
save_step: local state, _, stored_token = unpack_record(raw or '')  ⟶  raw or '' becomes raw
save_step: local state, _, stored_token = unpack_record(raw or '')  ⟶  '' becomes '?'
reserve_turn: unpack_record(turn_raw or '')  ⟶  turn_raw or '' becomes turn_raw
reserve_turn: unpack_record(turn_raw or '')  ⟶  '' becomes '?'
""",
    "the comparison of two fingerprints is symmetric": """
reserve: elseif differ(stored_fingerprint, fingerprint)  ⟶  stored_fingerprint, fingerprint becomes fingerprint, stored_fingerprint
reserve_turn: local differs = differ(waiting_fingerprint, fingerprint)  ⟶  waiting_fingerprint, fingerprint becomes fingerprint, waiting_fingerprint
reserve_turn: local differs = differ(stored_fingerprint, fingerprint)  ⟶  stored_fingerprint, fingerprint becomes fingerprint, stored_fingerprint
""",
    "equal fingerprints do not differ in their first bytes either": """
prelude: if fingerprint == '' or other == '' or fingerprint == other then  ⟶  fingerprint == '' or other == '' or fingerprint == other becomes fingerprint == '' or other == ''
""",
    "Lua treats position 0, or none, as the first position": """
continuation: owner = string.sub(owner, 1, 2 * ID)  ⟶  1 becomes 0
prelude: fingerprint, other = string.sub(fingerprint, 1, 8), string.sub(other, 1, 8)  ⟶  1 becomes 0
begin: redis.call('SET', turn, string.sub(turn_raw, 1, turn_position - 1)  ⟶  1 becomes 0
begin: redis.call('SET', turn, string.sub(started, 1, #started - #body) .. (waiting or ''), 'PX', ttl_ms)  ⟶  1 becomes 0
reserve_turn: redis.call('SET', turn, string.sub(turn_raw, 1, position - 1), 'KEEPTTL')  ⟶  1 becomes 0
reserve_turn: redis.call('SET', turn, string.sub(turn_raw, 1, position - 1)  ⟶  1 becomes 0
abandon: redis.call('SET', turn, string.sub(abandoned, 1, #abandoned - #body) .. waiting, 'KEEPTTL')  ⟶  1 becomes 0
release: redis.call('SET', turn, string.sub(released, 1, #released - #body) .. (waiting or ''), 'PX',  ⟶  1 becomes 0
prelude: if string.sub(format, 1, 1) == '=' then  ⟶  1 becomes 0
prelude: return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'  ⟶  1 becomes 0
prelude: return string.sub(raw, 1, 9) .. struct.pack('>I6', at) .. string.sub(raw, 16)  ⟶  1 becomes 0
""",
    "a number used as the format string yields itself": """
begin: orphaned_ms = string.format('%.0f', math.max(0, now - at)) .. read_met(stored_format)  ⟶  '%.0f', math.max(0, now - at) becomes math.max(0, now - at), '%.0f'
""",
    "generations are never negative": """
""",
    "an error takes many bytes, so the loop always breaks before its last iteration": """
""",
    "find_error returns nothing for a nil position in every further iteration": """
""",
    "for an unreadable record pcall returns an error message, which is not a state letter": """
""",
    "the shortest record has 21 bytes, so one cut to 15 or 16 bytes is damaged either way": """
prelude: return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'  ⟶  16 becomes 15
prelude: return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'  ⟶  16 becomes 17
prelude: return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'  ⟶  >= becomes >
""",
    "of the records without an attempt, only R has the time until when others come back": """
begin: elseif state == 'R' then  ⟶  state == 'R' becomes true
""",
    "the reply to a replay says what was written, whatever case it is given, except lost": """
fused_complete: return reply('ok')  ⟶  'ok' becomes ''
fused_complete: return reply('ok')  ⟶  'ok' becomes nil
""",
    "a begin of a key without a record does the same after the prelude, only slower": """
""",
}  # fmt: skip

EQUIVALENT_MUTANTS: dict[str, str] = {
    name: reason for reason, names in _BY_REASON.items() for name in names.strip().splitlines()
}
