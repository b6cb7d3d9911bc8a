-- extend: renews the lease, which then expires `lease_ms` from now.
--
-- An expired lease that was not taken over still belongs to its execution.
--
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   turn               the key's record, if the key may run again
-- ARGV
--   token              of the execution
--   lease_ms           right to run without another heartbeat
--   ttl_ms             lease_ms plus the time for which a dead execution is remembered
-- REPLIES
--   ok                 the lease has been extended
--   lost               the token does not hold the record; the current record

local record, turn = unpack(KEYS)
local token, lease_ms, ttl_ms = unpack(ARGV)

local now = read_clock()
local raw = redis.call('GET', record)
local turn_raw = turn and redis.call('GET', turn)
if not is_held_by(raw, token) or turn and not is_held_by(turn_raw, token) then
  return reply('lost', raw)
end
redis.call('SET', record, with_time(raw, now + lease_ms), 'PX', ttl_ms)
if turn then
  redis.call('SET', turn, with_time(turn_raw, now + lease_ms), 'PX', ttl_ms)
end
return reply('ok')
