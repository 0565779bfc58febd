#!/bin/bash
[ "$(curl -s http://127.0.0.1:8080/health)" = ok ] || { echo "no server"; exit 1; }
[ "$(curl -s http://127.0.0.1:8080/index.txt)" = "first page" ] || { echo "no page"; exit 1; }
echo "2 passed"
