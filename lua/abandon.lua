-- abandon: ends the lease of a dead process, so that the next begin takes over.
--
-- The worker's main process calls it when a process of its pool has died, or when it is about to kill one.
-- Only that process knew the token, so the execution is found by task id and worker. The record gets a token
-- that no execution has: a process that lives a moment longer can neither extend the lease nor settle. If it
-- was sending the continuation, the next delivery sends it.
--
-- KEYS
--   record             of the key or, if the key may run again, of the message
-- ARGV
--   task_id            of the task that the process ran
--   worker             the name of the process
--   grace_ms           how long it may still live; 0 if it is dead
--   reason             how the execution ends
-- REPLIES
--   ok                 the lease has ended
--   sending            the execution had ended; the next delivery sends the continuation
--   lost               that process does not hold the record; the current record

local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'
local record = KEYS[1]
local task_id, worker, grace_ms, reason = unpack(ARGV)
local raw = redis.call('GET', record)
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local readable, letter, attempt, token, at, fingerprint, id, by, _, tail, position = pcall(struct.unpack, LAYOUT, raw or '')
local case = 'lost'
if readable and string.find('BAbaTt', letter) and id == task_id and by == worker then
  case = string.find('Tt', letter) and 'sending' or 'ok'
  redis.call('SET', record, struct.pack(LAYOUT, case == 'ok' and 'a' or 't', attempt, token + (case == 'ok' and 1 or 0),
    math.min(at, now + grace_ms), #fingerprint, fingerprint, #id, id, #by, by, #reason, reason, #tail, tail)
    .. string.sub(raw, position), 'KEEPTTL')
end
return case .. ' ' .. clock[1] .. ' ' .. clock[2] .. ' ' .. (case == 'lost' and raw or '')
