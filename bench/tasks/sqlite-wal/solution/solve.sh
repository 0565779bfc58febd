#!/bin/bash
ls /work

sqlite3 /work/shop.db 'pragma journal_mode; select count(*) from orders;'

cd /work && cp saved-wal shop.db-wal && sqlite3 shop.db 'select count(*) from orders;'

sqlite3 /work/shop.db 'select max(id) from orders; pragma integrity_check;'

sqlite3 /work/shop.db 'pragma wal_checkpoint(truncate); pragma journal_mode=delete;'

sqlite3 /work/shop.db 'select count(*) from orders;' > /work/count; cat /work/count
