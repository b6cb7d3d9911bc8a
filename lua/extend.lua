-- extend: the heartbeat; the lease ends `lease_ms` from now.
--
-- A lease that ran out and was not taken over is still its holder's.
--
-- KEYS
--   record             the key's record
-- ARGV
--   token              of the execution
--   lease_ms           right to run without another heartbeat
--   ttl_ms             lease_ms, and then how long an execution that died is remembered
-- REPLIES
--   ok                 the lease is longer now
--   lost               the token does not hold the record; here is what does

local record = KEYS[1]
local token, lease_ms, ttl_ms = unpack(ARGV)

local now = ask_time()
local raw = redis.call('GET', record)
if not holds(raw, token) then
  return reply('lost', raw)
end
redis.call('SET', record, with_time(raw, now + lease_ms), 'PX', ttl_ms)
return reply('ok')
