"""Lists the mutants of the Lua scripts that are equivalent to the original, each with the reason.

Mutants are listed by `lua_mutants.Mutant.name`, which does not change when a line moves.
"""

from __future__ import annotations

_BY_REASON = {
    "nil cannot be unpacked, just as any string that is not a record": """
abandon: unpack_record(raw or '')  ⟶  raw or '' becomes raw
abandon: unpack_record(raw or '')  ⟶  '' becomes '?'
mark_continued: local state, _, _, _, _, stored_task_id, _, _, _, position = unpack_record(raw or '')  ⟶  raw or '' becomes raw
mark_continued: local state, _, _, _, _, stored_task_id, _, _, _, position = unpack_record(raw or '')  ⟶  '' becomes '?'
epilogue: local state, attempt, stored_token, _, fingerprint, task_id, worker, _, stored_format = unpack_record(raw or '')  ⟶  raw or '' becomes raw
epilogue: local state, attempt, stored_token, _, fingerprint, task_id, worker, _, stored_format = unpack_record(raw or '')  ⟶  '' becomes '?'
save_step: local state, _, stored_token = unpack_record(raw or '')  ⟶  raw or '' becomes raw
save_step: local state, _, stored_token = unpack_record(raw or '')  ⟶  '' becomes '?'
reserve_turn: unpack_record(turn_raw or '')  ⟶  turn_raw or '' becomes turn_raw
reserve_turn: unpack_record(turn_raw or '')  ⟶  '' becomes '?'
""",
    "the comparison of two fingerprints is symmetric": """
begin: if differ(stored_fingerprint, fingerprint)  ⟶  stored_fingerprint, fingerprint becomes fingerprint, stored_fingerprint
reserve: elseif differ(stored_fingerprint, fingerprint)  ⟶  stored_fingerprint, fingerprint becomes fingerprint, stored_fingerprint
reserve_turn: local differs = differ(waiting_fingerprint, fingerprint)  ⟶  waiting_fingerprint, fingerprint becomes fingerprint, waiting_fingerprint
reserve_turn: local differs = differ(stored_fingerprint, fingerprint)  ⟶  stored_fingerprint, fingerprint becomes fingerprint, stored_fingerprint
""",
    "equal fingerprints do not differ in their first bytes either": """
prelude: if fingerprint == '' or other == '' or fingerprint == other then  ⟶  fingerprint == '' or other == '' or fingerprint == other becomes fingerprint == '' or other == ''
""",
    "Lua treats position 0, or none, as the first position": """
prelude: fingerprint, other = string.sub(fingerprint, 1, 8), string.sub(other, 1, 8)  ⟶  1 becomes 0
begin: local unanswered = state == 'S' and owner ~= '' and string.find(unanswered_ids, owner, 1, true)  ⟶  1 becomes 0
begin: local unanswered = state == 'S' and owner ~= '' and string.find(unanswered_ids, owner, 1, true)  ⟶  1 becomes nil
mark_continued: redis.call('SET', record, string.sub(raw, 1, letter_position - 1) .. letter .. string.sub(raw, letter_position + 1),  ⟶  1 becomes 0
get: if not raw or string.sub(raw, 1, 1) == 'E' then  ⟶  1 becomes 0
begin: redis.call('SET', turn, string.sub(turn_raw, 1, turn_position - 1)  ⟶  1 becomes 0
begin: elseif not raw and turn_task_id == task_id and string.sub(turn_format, 1, 1) ~= '=' then  ⟶  1 becomes 0
begin: redis.call('SET', turn, string.sub(started, 1, #started - #body) .. (waiting or ''), 'PX', ttl_ms)  ⟶  1 becomes 0
reserve_turn: redis.call('SET', turn, string.sub(turn_raw, 1, position - 1), 'KEEPTTL')  ⟶  1 becomes 0
reserve_turn: redis.call('SET', turn, string.sub(turn_raw, 1, position - 1)  ⟶  1 becomes 0
reserve_turn: if raw and is_finished(string.sub(raw, 1, 1)) then  ⟶  1 becomes 0
reserve_turn: if raw and string.sub(raw, 1, 1) == 'E' then  ⟶  1 becomes 0
abandon: redis.call('SET', turn, string.sub(abandoned, 1, #abandoned - #body) .. waiting, 'KEEPTTL')  ⟶  1 becomes 0
release: redis.call('SET', turn, string.sub(released, 1, #released - #body) .. (waiting or ''), 'PX',  ⟶  1 becomes 0
prelude: if string.sub(format, 1, 1) == '=' then  ⟶  1 becomes 0
prelude: if readable and string.find('RSCDFGE', state, 1, true) then  ⟶  1 becomes 0
prelude: if readable and string.find('RSCDFGE', state, 1, true) then  ⟶  1 becomes nil
prelude: return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'  ⟶  1 becomes 0
prelude: return string.sub(raw, 1, 9) .. struct.pack('>I6', at) .. string.sub(raw, 16)  ⟶  1 becomes 0
""",
    "a number used as the format string yields itself": """
begin: orphaned_ms = string.format('%.0f', math.max(0, now - at)) .. read_met(stored_format)  ⟶  '%.0f', math.max(0, now - at) becomes math.max(0, now - at), '%.0f'
""",
    "generations are never negative": """
begin: awaited_generation = owner == '' and 0 or tonumber(owner)  ⟶  0 becomes -1
""",
    "an error takes many bytes, so the loop always breaks before its last iteration": """
prelude: for _ = 1, #raw do  ⟶  1 becomes 0
prelude: for _ = 1, #raw do  ⟶  1 becomes 2
""",
    "find_error returns nothing for a nil position in every further iteration": """
prelude: if not next_entry then  ⟶  not next_entry becomes false
""",
    "for an unreadable record pcall returns an error message, which is not a state letter": """
prelude: if readable and string.find('RSCDFGE', state, 1, true) then  ⟶  readable and string.find('RSCDFGE', state, 1, true) becomes string.find('RSCDFGE', state, 1, true)
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
begin: if not raw and not turn then  ⟶  if not raw and not turn then -- Most begins find no record. They end here, before the prelude: its functions cost more than this does. local clock = redis.call('TIME') local now_us = clock[1] * 1000000 + clock[2] raw = struct.pack(LAYOUT, 'S', 1, now_us, now_us / 1000 + lease_ms, #fingerprint, fingerprint, #task_id, task_id, #worker, worker, #execution_id, execution_id, 0, '') redis.call('SET', record, raw, 'PX', ttl_ms) return 'begun ' .. clock[1] .. ' ' .. clock[2] .. ' ' .. raw end becomes nothing
begin: if not raw and not turn then  ⟶  not raw and not turn becomes false
""",
}  # fmt: skip

EQUIVALENT_MUTANTS: dict[str, str] = {
    name: reason for reason, names in _BY_REASON.items() for name in names.strip().splitlines()
}
