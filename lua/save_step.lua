-- save_step: keeps what one part of an execution has done, for the execution that may have to take over.
--
-- KEYS
--   record             the key's record
-- ARGV
--   token              of the execution
--   entry              the step, as celery_idempotent/record/steps.py writes it
--   lease_ms           a step is a life sign: the lease ends this long from now
--   ttl_ms             lease_ms, and then how long an execution that died is remembered
-- REPLIES
--   ok                 kept
--   lost               the token does not hold the record; here is what does

local record = KEYS[1]
local token, entry, lease_ms, ttl_ms = unpack(ARGV)

local now = ask_time()
local raw = redis.call('GET', record)
local state, _, last_token = unpack_record(raw or '')
if state ~= 'S' or last_token ~= tonumber(token) then
  return reply('lost', raw)
end
-- Sent twice because the first reply was lost, it is there already.
local kept = string.sub(raw, -#entry) == entry and raw or raw .. entry
redis.call('SET', record, with_time(kept, now + lease_ms), 'PX', ttl_ms)
return reply('ok')
