-- complete: stores the result; every later begin replays it.
--
-- INCLUDE
--   epilogue             makes the record `outcome`
-- KEYS
--   record             the key's record
-- ARGV
--   token              of the execution
--   format             how the result is written, or '' where it is not kept
--   body               the result, or the reason why it is not kept
--   retention_ms       how long the outcome is kept
-- REPLIES
--   ok                 stored
--   lost               the token does not hold the record; here is what does

local record = KEYS[1]
local token, format, body, retention_ms = unpack(ARGV)
local outcome = 'C'
