"""Lists the mutants of the Lua scripts that are equivalent to the original, each with the reason.

Mutants are listed by `lua_mutants.Mutant.name`, which does not change when a line moves.
"""

from __future__ import annotations

_BY_REASON = {
    "the comparison of two fingerprints is symmetric": """
begin: local differs = differ(stored_fingerprint, fingerprint)  ⟶  stored_fingerprint, fingerprint becomes fingerprint, stored_fingerprint
begin: elseif differ(stored_fingerprint, fingerprint)  ⟶  stored_fingerprint, fingerprint becomes fingerprint, stored_fingerprint
reserve: elseif differ(stored_fingerprint, fingerprint)  ⟶  stored_fingerprint, fingerprint becomes fingerprint, stored_fingerprint
reserve_turn: local differs = differ(waiting_fingerprint, fingerprint)  ⟶  waiting_fingerprint, fingerprint becomes fingerprint, waiting_fingerprint
reserve_turn: local differs = differ(stored_fingerprint, fingerprint)  ⟶  stored_fingerprint, fingerprint becomes fingerprint, stored_fingerprint
""",
    "Lua treats position 0, or none, as the first position": """
abandon: redis.call('SET', turn, string.sub(abandoned, 1, #abandoned - #body) .. waiting, 'KEEPTTL')  ⟶  1 becomes 0
begin: return deadline_of(owner) > now and id ~= execution_id and not string.find(unanswered_ids, id, 1, true)  ⟶  1 becomes 0
begin: return deadline_of(owner) > now and id ~= execution_id and not string.find(unanswered_ids, id, 1, true)  ⟶  1 becomes nil
begin: local former = string.sub(entry, 1, -2 * ID - 1) .. string.gsub(root_of(owner), '.', function(byte)  ⟶  1 becomes 0
begin: redis.call('SET', turn, string.sub(turn_raw, 1, turn_position - 1)  ⟶  1 becomes 0
begin: local unanswered = stored_id ~= '' and string.find(unanswered_ids, stored_id, 1, true)  ⟶  1 becomes 0
begin: local unanswered = stored_id ~= '' and string.find(unanswered_ids, stored_id, 1, true)  ⟶  1 becomes nil
begin: redis.call('SET', turn, string.sub(started, 1, #started - #body) .. (waiting or ''), 'PX', ttl_ms)  ⟶  1 becomes 0
continuation: owner = string.sub(owner, 1, 2 * ID)  ⟶  1 becomes 0
prelude: return string.sub(owner, 1, ID)  ⟶  1 becomes 0
prelude: return string.sub(owner, 1, 2 * ID) .. struct.pack('>I6', till)  ⟶  1 becomes 0
prelude: return raw and string.sub(raw, 1, 1) == 'S' and string.sub(raw, 3, 9) == struct.pack('>I7', token)  ⟶  1 becomes 0
prelude: return string.sub(raw, 1, 9) .. struct.pack('>I6', at) .. string.sub(raw, 16)  ⟶  1 becomes 0
prelude: fingerprint, other = string.sub(fingerprint, 1, 8), string.sub(other, 1, 8)  ⟶  1 becomes 0
prelude: fingerprint, other = string.sub(fingerprint, 1, 8), string.sub(other, 1, 8)  ⟶  1 becomes 0 (2)
release: redis.call('SET', turn, string.sub(released, 1, #released - #body) .. (waiting or ''), 'PX',  ⟶  1 becomes 0
reserve_turn: redis.call('SET', turn, string.sub(turn_raw, 1, position - 1), 'KEEPTTL')  ⟶  1 becomes 0
reserve_turn: redis.call('SET', turn, string.sub(turn_raw, 1, position - 1)  ⟶  1 becomes 0
""",
    "a number used as the format string yields itself": """
begin: orphaned_ms = string.format('%.0f', math.max(0, now - at)) .. read_met(stored_format)  ⟶  '%.0f', math.max(0, now - at) becomes math.max(0, now - at), '%.0f'
""",
    "the shortcut for most begins is not taken, and the rest of the script does the same": """
begin: if not raw and not entry_raw and not turn then  ⟶  if not raw and not entry_raw and not turn then -- Most begins find no record. They end here, before the prelude: its functions cost more than this does. local clock = redis.call('TIME') local now_us = clock[1] * 1000000 + clock[2] raw = struct.pack(LAYOUT, 'S', 1, now_us, now_us / 1000 + lease_ms, #fingerprint, fingerprint, #task_id, task_id, #worker, worker, #root + #execution_id, root .. execution_id, 0, '') redis.call('SET', record, raw, 'PX', ttl_ms) return 'begun ' .. clock[1] .. ' ' .. clock[2] .. ' ' .. raw end becomes nothing
begin: if not raw and not entry_raw and not turn then  ⟶  not raw and not entry_raw and not turn becomes false
""",
    "the shortcut for most replays is not taken, and the rest of the script does the same": """
begin: elseif state and is_finished(state) and continues == '0' and not entry_raw and not turn  ⟶  state and is_finished(state) and continues == '0' and not entry_raw and not turn and not string.match(stored_format, '^=') becomes false
begin: elseif state and is_finished(state) and continues == '0' and not entry_raw and not turn  ⟶  '0' becomes ''
begin: and not string.match(stored_format, '^=') then  ⟶  '^=' becomes ''
""",
    "the shortcut for most completions is not taken, and the rest of the script does the same": """
fused_complete: if token ~= '0' and not turn then  ⟶  if token ~= '0' and not turn then local _, state, attempt, stored_token, _, fingerprint, task_id, worker, _, stored_format = pcall(struct.unpack, LAYOUT, redis.call('GET', record)) if state == 'S' and stored_token == tonumber(token) and stored_format == '' and redis.pcall('GET', result) == false then -- Most completions. They end here, before the prelude: its functions cost more than this does. local clock = redis.call('TIME') local now = clock[1] * 1000 + clock[2] / 1000 redis.call('SET', record, struct.pack(LAYOUT, outcome, attempt, stored_token, now, #fingerprint, fingerprint, #task_id, task_id, #worker, worker, 0, '', #format, format) .. body, 'PX', retention_ms) local is_written = type(redis.pcall('PUBLISH', result, meta)) == 'number' if is_written then redis.call('SET', result, meta, unpack(expires == '0' and {} or {'EX', expires})) end return (is_written and 'written ' or 'ok ') .. clock[1] .. ' ' .. clock[2] .. ' ' end end becomes nothing
fused_complete: if token ~= '0' and not turn then  ⟶  token ~= '0' and not turn becomes false
fused_complete: pcall(struct.unpack, LAYOUT, redis.call('GET', record))  ⟶  pcall(struct.unpack, LAYOUT, redis.call('GET', record)) becomes nil
fused_complete: pcall(struct.unpack, LAYOUT, redis.call('GET', record))  ⟶  struct.unpack becomes nil
fused_complete: pcall(struct.unpack, LAYOUT, redis.call('GET', record))  ⟶  struct.unpack, LAYOUT becomes LAYOUT, struct.unpack
fused_complete: pcall(struct.unpack, LAYOUT, redis.call('GET', record))  ⟶  , LAYOUT becomes nothing
fused_complete: pcall(struct.unpack, LAYOUT, redis.call('GET', record))  ⟶  LAYOUT becomes nil
fused_complete: pcall(struct.unpack, LAYOUT, redis.call('GET', record))  ⟶  LAYOUT, redis.call('GET', record) becomes redis.call('GET', record), LAYOUT
fused_complete: pcall(struct.unpack, LAYOUT, redis.call('GET', record))  ⟶  , redis.call('GET', record) becomes nothing
fused_complete: pcall(struct.unpack, LAYOUT, redis.call('GET', record))  ⟶  redis.call('GET', record) becomes nil
fused_complete: if state == 'S' and stored_token == tonumber(token) and stored_format == ''  ⟶  if state == 'S' and stored_token == tonumber(token) and stored_format == '' and redis.pcall('GET', result) == false then -- Most completions. They end here, before the prelude: its functions cost more than this does. local clock = redis.call('TIME') local now = clock[1] * 1000 + clock[2] / 1000 redis.call('SET', record, struct.pack(LAYOUT, outcome, attempt, stored_token, now, #fingerprint, fingerprint, #task_id, task_id, #worker, worker, 0, '', #format, format) .. body, 'PX', retention_ms) local is_written = type(redis.pcall('PUBLISH', result, meta)) == 'number' if is_written then redis.call('SET', result, meta, unpack(expires == '0' and {} or {'EX', expires})) end return (is_written and 'written ' or 'ok ') .. clock[1] .. ' ' .. clock[2] .. ' ' end becomes nothing
fused_complete: if state == 'S' and stored_token == tonumber(token) and stored_format == ''  ⟶  state == 'S' and stored_token == tonumber(token) and stored_format == '' and redis.pcall('GET', result) == false becomes false
fused_complete: if state == 'S' and stored_token == tonumber(token) and stored_format == ''  ⟶  'S' becomes ''
fused_complete: if state == 'S' and stored_token == tonumber(token) and stored_format == ''  ⟶  tonumber(token) becomes token
fused_complete: if state == 'S' and stored_token == tonumber(token) and stored_format == ''  ⟶  token becomes nil
fused_complete: if state == 'S' and stored_token == tonumber(token) and stored_format == ''  ⟶  '' becomes '?'
fused_complete: and redis.pcall('GET', result) == false then  ⟶  'GET' becomes ''
fused_complete: and redis.pcall('GET', result) == false then  ⟶  'GET' becomes nil
fused_complete: and redis.pcall('GET', result) == false then  ⟶  'GET', result becomes result, 'GET'
fused_complete: and redis.pcall('GET', result) == false then  ⟶  , result becomes nothing
fused_complete: and redis.pcall('GET', result) == false then  ⟶  result becomes nil
""",
    "the reply to a replay says what was written, whatever case it is given, except lost": """
fused_complete: return reply('ok')  ⟶  'ok' becomes ''
fused_complete: return reply('ok')  ⟶  'ok' becomes nil
""",
}  # fmt: skip

EQUIVALENT_MUTANTS: dict[str, str] = {
    name: reason for reason, names in _BY_REASON.items() for name in names.strip().splitlines()
}
