-- fail: stores an error that ends the key; every later begin raises it again.
--
-- INCLUDE
--   epilogue           changes the record to `outcome`
-- KEYS
--   record             the key's record
-- ARGV
--   token              of the execution
--   format             encoding of the error
--   body               the error
--   retention_ms       how long the outcome is kept
-- REPLIES
--   ok                 stored
--   lost               the token does not hold the record; the current record

local record = KEYS[1]
local token, format, body, retention_ms = unpack(ARGV)
local outcome = 'F'
