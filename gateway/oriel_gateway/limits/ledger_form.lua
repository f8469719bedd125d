-- The form of the records, which a gateway writes unless there is that of a later version.
-- KEYS: the mark. ARGV: holder, this gateway's form, seconds that the mark is kept. Answers the mark.
local text = redis.call('GET', KEYS[1]) or '0'
local found = tonumber(text)
if not found or found > tonumber(ARGV[2]) then return text end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return ARGV[2]
