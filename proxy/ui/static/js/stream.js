// Reads the event stream in a worker that all pages share. Browsers open at most six connections to a server, so a stream
// per page would leave none for requests.

const QUIET_MS = 40_000;
const ports = new Set();
let token = null;
let reading = null;
let wake = () => {};

self.onconnect = ({ ports: [port] }) => serve(port);

function serve(port) {
  ports.add(port);
  port.onmessage = ({ data }) => {
    if (data.bye) {
      ports.delete(port);
      if (ports.size === 0) reading?.abort();
      return;
    }
    const other = data.token !== token;
    token = data.token;
    if (other) reading?.abort();
    // The token may be new: reconnect at once.
    wake();
    if (!reading) read(data.url);
  };
  port.start();
}

const tell = (message) => ports.forEach((port) => port.postMessage(message));

async function read(url) {
  let wait = 1000;
  while (ports.size) {
    reading = new AbortController();
    try {
      await follow(url, reading);
      wait = 1000;
    } catch (error) {
      tell({ lost: true, status: error.status ?? 0 });
      wait = Math.min(20_000, wait * 2);
    }
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, wait);
    });
  }
  reading = null;
}

async function follow(url, stopping) {
  let timer = 0;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => stopping.abort(), QUIET_MS);
  };
  alive();
  try {
    const response = await fetch(url, { headers: token ? { Authorization: `Bearer ${token}` } : {}, signal: stopping.signal, cache: "no-store" });
    if (!response.ok) throw Object.assign(new Error("refused"), { status: response.status });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      alive();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").find((line) => line.startsWith("data: "));
        if (data) tell(JSON.parse(data.slice(6)));
      }
    }
  } finally {
    clearTimeout(timer);
  }
}
