-- epilogue: the common end of complete and fail. Changes STARTED under `token` to `outcome` and drops the
-- fields that only an execution needs.

local now = read_clock()
local raw = redis.call('GET', record)
local state, attempt, stored_token, _, fingerprint, task_id, worker, owner, stored_format = unpack_record(raw)
local turn_raw = turn and redis.call('GET', turn)
local is_resent = state == outcome or state == (outcome == 'C' and 'P' or 'Q')
if stored_token ~= tonumber(token) or state ~= 'S' and not is_resent
    or turn and state == 'S' and not is_held_by(turn_raw, token) then
  -- If the turn is missing, an operator has forgotten the key, and no other execution has taken over.
  return reply('lost', turn_raw ~= false and raw)
end
if is_resent then
  -- Stored already: the client resends a command whose reply was lost. WAIT counts only writes of the
  -- same connection, so write again.
  redis.call('PEXPIRE', record, math.max(retention_ms, redis.call('PTTL', record)))
  return reply('ok', raw)
end
retention_ms = kept_ms(stored_format, retention_ms, now)
-- Only a message that has a continuation, or may be published again, is distinguished from others later.
if lease_ms == '' and not turn then
  owner = ''
end
local letter, new_owner = sending(outcome, owner, now, lease_ms)
redis.call('SET', record, pack(letter, attempt, stored_token, now, fingerprint, task_id, worker, new_owner,
  format, body), 'PX', retention_ms)
if turn then
  end_turn(turn, turn_raw, now,
    pack(outcome, attempt, stored_token, now, fingerprint, task_id, worker, owner, format, body), retention_ms)
end
return reply('ok')
