-- continuation: marks that the continuation of a finished task has been sent, or renews its lease.
--
-- A redelivery of the same message then replays without sending callbacks, the rest of a chain or a
-- chord's count again. The continuation is that of the record's outcome, or of the message's entry: an
-- error that ended it, or a duplicate's own.
--
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   entry              the message's
-- ARGV
--   execution_id       of the delivery that sends the continuation
--   lease_ms           how long it may go on; 0: it has given up; '': the continuation has been sent
-- REPLIES
--   ok                 marked, or renewed
--   lost               another delivery sends it, or it has been sent; the current record

local record, entry = unpack(KEYS)
local execution_id, lease_ms = unpack(ARGV)

local now = read_clock()
for _, key in ipairs({record, entry}) do
  local raw = redis.call('GET', key)
  local state, attempt, token, at, fingerprint, task_id, worker, owner, format, position = unpack_record(raw)
  if state and is_finished(state) and execution_of(owner) == execution_id then
    if lease_ms == '' then
      state = (state == 'P' or state == 'C') and 'C' or 'F'
      owner = string.sub(owner, 1, 2 * ID)
    elseif is_sending(state) then
      owner = with_deadline(owner, now + lease_ms)
    else
      break
    end
    redis.call('SET', key, pack(state, attempt, token, at, fingerprint, task_id, worker, owner, format,
      string.sub(raw, position)), 'KEEPTTL')
    return reply('ok')
  end
end
return reply('lost', redis.call('GET', record))
