-- extend: renews the lease, stores a finished step, and confirms that the execution runs.
--
-- The heartbeat calls it, and each step. A lease that has expired and was not taken over still belongs to its
-- execution, and is renewed too.
--
-- KEYS
--   record             of the key or, if the key may run again, of the message
--   turn               of the key, if it may run again
-- ARGV
--   token              of the execution
--   lease_ms           right to run without another heartbeat
--   ttl_ms             lease_ms plus the time for which a dead execution is remembered
--   step               as encoded by celery_idempotent/core/record/steps.py; '' none
-- REPLIES
--   ok                 renewed
--   lost               the token does not hold the record; the current record

local record, turn = unpack(KEYS)
local token, lease_ms, ttl_ms, step = unpack(ARGV)
local raw = redis.call('GET', record) or ''
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local case = 'lost'
if string.find(raw, '^[BAba]') and string.sub(raw, 3, 9) == struct.pack('>I7', token) then
  case = 'ok'
  if string.sub(raw, -#step) == step then
    step = ''  -- stored already: the first reply was lost
  end
  redis.call('SET', record, 'A' .. string.sub(raw, 2, 9) .. struct.pack('>I6', now + lease_ms)
    .. string.sub(raw, 16) .. step, 'PX', ttl_ms)
  if turn then
    redis.call('PEXPIRE', turn, ttl_ms)
  end
end
return case .. ' ' .. clock[1] .. ' ' .. clock[2] .. ' ' .. (case == 'ok' and '' or raw)
