-- fail: stores an error that ends the key; every later begin raises it again.
--
-- INCLUDE
--   epilogue           changes the record to `outcome`
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   turn               the key's record, if the key may run again
-- ARGV
--   token              of the execution
--   format             encoding of the error, or '' if it is not stored
--   body               the error, or the reason why it is not stored
--   retention_ms       how long the outcome is kept
--   lease_ms           how long sending the continuation may take; 0: nothing is sent; '': there is none
-- REPLIES
--   ok                 stored
--   lost               the token does not hold the record; the current record

local record, turn = unpack(KEYS)
local token, format, body, retention_ms, lease_ms = unpack(ARGV)
local outcome = 'F'
