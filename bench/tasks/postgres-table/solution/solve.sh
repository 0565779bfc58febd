#!/bin/bash
ls -d /usr/lib/postgresql/*/bin

mkdir -p /work/db && chown nobody:nogroup /work/db && setpriv --reuid nobody --regid nogroup --clear-groups "$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)/initdb" -D /work/db -U me --auth trust --no-sync 2>&1 | grep -c ok

setpriv --reuid nobody --regid nogroup --clear-groups "$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)/pg_ctl" -D /work/db -w -l /work/db/log -o "-p 5440 -c unix_socket_directories=" start | tail -n 1

psql -h 127.0.0.1 -p 5440 -U me postgres -c 'create table t as select n, n * n as square from generate_series(1, 20) n'

psql -h 127.0.0.1 -p 5440 -U me postgres -tAc 'select sum(square) from t'
