-- settle: ends an execution, and may write the result of the task as its result backend does.
--
-- It writes the result only if the backend has none, or one that is certainly no success: Celery never
-- overwrites a success. Every serializer of Celery writes the words "status" and "SUCCESS" as they are.
-- Compression may hide both, and then the result is left to Celery.
--
-- KEYS
--   record             of the key or, if the key may run again, of the message
--   second             result: the task's, in the result backend, with `meta`; W: the turn, if there is one
-- ARGV
--   token              of the execution; 0: a replay, which only writes the result
--   letter             V value; T value, and the continuation follows (V for a T: it was sent); E error that
--                      is replayed; D replaced by another task; W reserved for its retry; '' the key is free
--   at_ms              T: how long sending may take; W: how long the key stays reserved; else 0
--   owner              W, D: the first generation that continues; else ''
--   tail               format, traceparent and label; copied unread
--   body               the outcome; D: id of the other task
--   retention_ms       how long the record is kept
--   meta               what the result backend stores, or ''
--   expires            seconds for which it stores that; 0: for ever
-- REPLIES
--   ok                 settled, now or before
--   written            the same, and the result backend has the result
--   lost               the token does not hold the record; the current record

local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'
local record, second = unpack(KEYS)
local token, letter, at_ms, owner, tail, body, retention_ms, meta, expires = unpack(ARGV)
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function reply(case, raw) return case .. ' ' .. clock[1] .. ' ' .. clock[2] .. ' ' .. (raw or '') end

if token ~= '0' then
  local raw = redis.call('GET', record)
  local readable, state, attempt, stored, _, fingerprint, id, worker, _, stored_tail, position =
    pcall(struct.unpack, LAYOUT, raw or '')
  if not raw and letter == '' then
    return reply('ok')
  elseif not readable or stored ~= tonumber(token) then
    return reply('lost', raw)
  elseif string.find('Tt', state) and letter == 'V' then
    redis.call('SET', record, 'V' .. string.sub(raw, 2, 9) .. struct.pack('>I6', now) .. string.sub(raw, 16), 'KEEPTTL')
    return reply('ok')
  elseif not string.find('BAba', state) and (state ~= 'D' or letter ~= '') then
    -- Settled before, and sent again. With wait_replicas, a WAIT follows on this connection, which counts only
    -- writes of its own connection, so this writes something.
    redis.call('PEXPIRE', record, math.max(retention_ms, redis.call('PTTL', record)))
    return reply('ok')
  end
  local steps = state == 'D' and '' or string.sub(raw, position)
  if letter == '' and steps == '' then
    redis.call('DEL', record)
    return reply('ok')
  elseif letter == '' or letter == 'W' then
    letter, attempt, owner, tail, body = 'W', 0, letter == '' and '0' or owner, stored_tail, steps
    fingerprint = steps == '' and '' or fingerprint
  end
  redis.call('SET', record, struct.pack(LAYOUT, letter, attempt, stored, now + at_ms, #fingerprint, fingerprint, #id,
    id, #worker, worker, #owner, owner, #tail, tail) .. body, 'PX', retention_ms)
end
if second and letter == 'W' then
  redis.call('PEXPIRE', second, retention_ms)
elseif second then
  local known = redis.pcall('GET', second)
  if (known == false or type(known) == 'string' and string.find(known, 'status') and not string.find(known, 'SUCCESS'))
      and type(redis.pcall('PUBLISH', second, meta)) == 'number' then
    redis.call('SET', second, meta, unpack(expires == '0' and {} or {'EX', expires}))
    return reply('written')
  end
end
return reply('ok')
