-- The end of complete and of fail: STARTED under `token` becomes `outcome`. What the execution needed
-- goes.

local now = ask_time()
local raw = redis.call('GET', record)
local state, attempt, last_token, _, fingerprint, task_id, worker = unpack_record(raw or '')
if last_token ~= tonumber(token) or state ~= 'S' and state ~= outcome then
  return reply('lost', raw)
end
if state == outcome then
  -- Stored already: the reply to the first try was lost, and the client has sent it again. A WAIT
  -- behind it speaks of what this connection has written, so write.
  redis.call('PEXPIRE', record, retention_ms)
  return reply('ok', raw)
end
local settled = pack(outcome, attempt, last_token, now, fingerprint, task_id, worker, '', format, body)
redis.call('SET', record, settled, 'PX', retention_ms)
return reply('ok')
