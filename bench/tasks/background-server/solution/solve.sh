#!/bin/bash
ls -R /work/site

echo ok > /work/site/health

cd /work/site && (setsid /usr/bin/python3 -u -m http.server 8080 --bind 127.0.0.1 >/work/server.log 2>&1 </dev/null &); sleep 1

curl -s http://127.0.0.1:8080/health

curl -s http://127.0.0.1:8080/ | grep -c href

wc -l < /work/server.log
