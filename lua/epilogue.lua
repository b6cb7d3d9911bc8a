-- epilogue: the common end of complete and fail. Changes STARTED under `token` to `outcome` and drops the
-- fields that only an execution needs.

local now = read_clock()
local raw = redis.call('GET', record)
local state, attempt, stored_token, _, fingerprint, task_id, worker, _, stored_format = unpack_record(raw or '')
local turn_raw = turn and redis.call('GET', turn)
if stored_token ~= tonumber(token) or state ~= 'S' and state ~= outcome
    or turn and state == 'S' and not is_held_by(turn_raw, token) then
  -- Without a turn an operator has forgotten the key, and no other execution is to be expected.
  return reply('lost', turn_raw ~= false and raw)
end
if state == outcome then
  -- Stored already: the client resends a command whose reply was lost. WAIT counts only writes of the
  -- same connection, so write again.
  redis.call('PEXPIRE', record, retention_ms)
  return reply('ok', raw)
end
retention_ms = kept_ms(stored_format, retention_ms, now)
local settled = pack(outcome, attempt, stored_token, now, fingerprint, task_id, worker, '', format, body)
redis.call('SET', record, settled, 'PX', retention_ms)
if turn then
  end_turn(turn, turn_raw, now, settled, retention_ms)
end
return reply('ok')
