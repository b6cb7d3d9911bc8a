-- fail: stores an error that ends the key; every later begin raises it again.
--
-- INCLUDE
--   epilogue             makes the record `outcome`
-- KEYS
--   record             the key's record
-- ARGV
--   token              of the execution
--   format             how the error is written
--   body               the error
--   retention_ms       how long the outcome is kept
-- REPLIES
--   ok                 stored
--   lost               the token does not hold the record; here is what does

local record = KEYS[1]
local token, format, body, retention_ms = unpack(ARGV)
local outcome = 'F'
