-- save_step: stores a finished step of an execution, for an execution that may take over.
--
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   turn               the key's record, if the key may run again
-- ARGV
--   token              of the execution
--   entry              the step, as encoded by celery_idempotent/record/steps.py
--   lease_ms           a step also renews the lease, which then expires this long from now
--   ttl_ms             lease_ms plus the time for which a dead execution is remembered
-- REPLIES
--   ok                 stored
--   lost               the token does not hold the record; the current record

local record, turn = unpack(KEYS)
local token, entry, lease_ms, ttl_ms = unpack(ARGV)

local now = read_clock()
local raw = redis.call('GET', record)
local state, _, stored_token = unpack_record(raw)
local turn_raw = turn and redis.call('GET', turn)
if state ~= 'S' or stored_token ~= tonumber(token) or turn and not is_held_by(turn_raw, token) then
  return reply('lost', raw)
end
-- If the first reply was lost, the client resends a step that is stored already.
local extended = string.sub(raw, -#entry) == entry and raw or raw .. entry
redis.call('SET', record, with_time(extended, now + lease_ms), 'PX', ttl_ms)
if turn then
  redis.call('SET', turn, with_time(turn_raw, now + lease_ms), 'PX', ttl_ms)
end
return reply('ok')
