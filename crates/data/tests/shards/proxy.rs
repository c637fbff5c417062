//! A proxy between client and server that logs every request and injects faults.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

/// A logged request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// Path and query.
    pub(crate) target: String,
    /// First and last requested byte.
    pub(crate) range: Option<(u64, u64)>,
}

/// Fault injected into a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The proxy responds with this status, without the server.
    Status(u16),
    /// The connection ends after this many bytes of the body.
    CutAfter(usize),
    /// The connection stalls after this many bytes of the body.
    StallAfter(usize),
    /// This many bytes of the body are sent every ten milliseconds.
    Trickle(usize),
    /// This byte of the body is changed.
    Corrupt(usize),
}

type Rule = Box<dyn FnMut(&Request) -> Fault + Send>;

/// The proxy; its threads end with their connections.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<ProxyState>,
}

struct ProxyState {
    server: SocketAddr,
    log: Mutex<Vec<Request>>,
    logged: Condvar,
    rule: Mutex<Rule>,
}

impl Request {
    /// Whether it is a GET request for this object.
    pub(crate) fn gets(&self, key: &str) -> bool {
        self.method == "GET" && self.target.split('?').next().unwrap().ends_with(&format!("/{key}"))
    }
}

impl Proxy {
    pub(crate) fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let rule: Rule = Box::new(|_| Fault::None);
        let (log, logged) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(ProxyState { server, log, logged, rule: Mutex::new(rule) });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&accepting);
                // Errors are expected: in these tests clients disconnect during a response.
                thread::spawn(move || serve(&shared, client).ok());
            }
        });
        Self { address, shared }
    }

    /// Sets the rule that selects the fault for every request from now on.
    pub(crate) fn inject(&self, rule: impl FnMut(&Request) -> Fault + Send + 'static) {
        *self.shared.rule.lock().unwrap() = Box::new(rule);
    }

    /// The requests so far.
    pub(crate) fn log(&self) -> Vec<Request> {
        self.shared.log.lock().unwrap().clone()
    }

    pub(crate) fn clear_log(&self) {
        self.shared.log.lock().unwrap().clear();
    }

    /// Waits until the requests so far satisfy a condition.
    pub(crate) fn wait_for(&self, condition: impl Fn(&[Request]) -> bool) {
        let log = self.shared.log.lock().unwrap();
        let limit = Duration::from_secs(20);
        let (log, timeout) =
            self.shared.logged.wait_timeout_while(log, limit, |log| !condition(log)).unwrap();
        assert!(!timeout.timed_out(), "the expected request did not arrive: {log:#?}");
    }
}

/// Handles one request per connection, so that a fault affects only one request.
fn serve(shared: &ProxyState, mut client: TcpStream) -> std::io::Result<()> {
    let head = read_head(&mut client)?;
    let request = parse(&head);
    let fault = (shared.rule.lock().unwrap())(&request);
    shared.log.lock().unwrap().push(request);
    shared.logged.notify_all();

    if let Fault::Status(status) = fault {
        let body = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>";
        let length = body.len();
        return write!(
            client,
            "HTTP/1.1 {status} Fault\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
    }
    let mut server = TcpStream::connect(shared.server)?;
    server.write_all(close_after(&head).as_bytes())?;
    let head = read_head(&mut server)?;
    let mut body = Vec::new();
    server.read_to_end(&mut body)?;

    client.write_all(close_after(&head).as_bytes())?;
    match fault {
        Fault::None | Fault::Status(_) => client.write_all(&body)?,
        Fault::CutAfter(bytes) => client.write_all(&body[..bytes.min(body.len())])?,
        Fault::StallAfter(bytes) => {
            client.write_all(&body[..bytes.min(body.len())])?;
            // Wait until the client disconnects.
            client.read_exact(&mut [0]).ok();
        }
        Fault::Trickle(bytes) => {
            for piece in body.chunks(bytes) {
                client.write_all(piece)?;
                thread::sleep(Duration::from_millis(10));
            }
        }
        Fault::Corrupt(byte) => {
            body[byte] ^= 1;
            client.write_all(&body)?;
        }
    }
    client.shutdown(Shutdown::Both)
}

fn read_head(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    Ok(String::from_utf8(head).unwrap())
}

fn parse(head: &str) -> Request {
    let mut words = head.split(' ');
    let (method, target) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
    let range = head.lines().find_map(|line| {
        let line = line.to_ascii_lowercase();
        let (first, last) = line.strip_prefix("range: bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    Request { method, target, range }
}

/// The head with `Connection: close`, so that the connection ends after the body.
fn close_after(head: &str) -> String {
    let is_connection = |line: &&str| line.to_ascii_lowercase().starts_with("connection:");
    let lines: Vec<&str> =
        head.trim_end().split("\r\n").filter(|line| !is_connection(line)).collect();
    format!("{}\r\nConnection: close\r\n\r\n", lines.join("\r\n"))
}
