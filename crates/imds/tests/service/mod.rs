//! An instance metadata service on loopback, for tests of any crate. It needs only `humantime`.
//!
//! ```ignore
//! #[path = "../../crates/imds/tests/service/mod.rs"]
//! mod service;
//! ```
//!
//! It behaves like EC2's (tokens are required, connections are closed after every response) or like AWS's
//! amazon-ec2-metadata-mock (times grow from request to request, tokens may be optional), and misbehaves on demand.

#![allow(dead_code, reason = "each test binary uses only some items")]

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

pub(crate) const TOKEN: &str = "/latest/api/token";
pub(crate) const INTERRUPTION: &str = "/latest/meta-data/spot/instance-action";
pub(crate) const REBALANCE: &str = "/latest/meta-data/events/recommendations/rebalance";
pub(crate) const LIFECYCLE: &str = "/latest/meta-data/autoscaling/target-lifecycle-state";

/// How often a waiting thread checks whether the service was stopped.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A fault of the service, until the next change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misbehaviour {
    /// No response is ever sent.
    Hang,
    /// The connection is closed without a response.
    Drop,
    /// This status instead of the right response, also to requests for tokens.
    Status(u16),
    /// 401 to every request for a document, whatever its token.
    Unauthorized,
    /// Half a JSON document, also for documents that do not exist.
    Garbage,
    /// A document without an end, also for documents that do not exist.
    Huge,
    /// The right response, twenty bytes a second.
    Drip,
}

/// Whether documents require a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tokens {
    Required,
    /// IMDSv1 works too.
    Optional,
}

/// The service; stopped when it is dropped.
pub(crate) struct Service {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    is_stopped: AtomicBool,
    state: Mutex<State>,
}

struct State {
    is_mock: bool,
    tokens: Tokens,
    /// How far the service's clock is ahead of the real time.
    clock_offset: Duration,
    interruption: Option<(String, Timestamp)>,
    rebalance: Option<Timestamp>,
    lifecycle: Option<String>,
    /// By path; "" applies to all paths.
    misbehaviours: BTreeMap<String, Misbehaviour>,
    /// Expiry of each token.
    issued: HashMap<String, Instant>,
    issued_count: usize,
    understates_ttl: bool,
    requests: BTreeMap<String, usize>,
    huge_bytes: u64,
    connections: usize,
}

/// A time relative to the moment when it was set.
#[derive(Clone, Copy)]
struct Timestamp {
    set: SystemTime,
    in_seconds: i64,
}

struct Request {
    method: String,
    path: String,
    headers: HashMap<String, String>,
}

struct Response {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: String,
}

impl Service {
    /// Starts a service like EC2's.
    pub(crate) fn start() -> Self {
        Self::start_as(false, Tokens::Required)
    }

    /// Starts a service like amazon-ec2-metadata-mock.
    pub(crate) fn start_as_mock(tokens: Tokens) -> Self {
        Self::start_as(true, tokens)
    }

    fn start_as(is_mock: bool, tokens: Tokens) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = State {
            is_mock,
            tokens,
            clock_offset: Duration::ZERO,
            interruption: None,
            rebalance: None,
            lifecycle: None,
            misbehaviours: BTreeMap::new(),
            issued: HashMap::new(),
            issued_count: 0,
            understates_ttl: false,
            requests: BTreeMap::new(),
            huge_bytes: 0,
            connections: 0,
        };
        let state = Mutex::new(state);
        let shared = Arc::new(Shared { is_stopped: AtomicBool::new(false), state });
        let serving = Arc::clone(&shared);
        thread::spawn(move || {
            for socket in listener.incoming() {
                if serving.is_stopped() {
                    return;
                }
                let (Ok(socket), shared) = (socket, Arc::clone(&serving)) else { continue };
                shared.state().connections += 1;
                thread::spawn(move || {
                    // A client that closes the connection is not an error.
                    let _ = shared.serve(socket);
                    shared.state().connections -= 1;
                });
            }
        });
        Self { address, shared }
    }

    /// Environment variables for a process that should use this service.
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        [
            ("AWS_EC2_METADATA_SERVICE_ENDPOINT", format!("http://{}", self.address)),
            ("AWS_EC2_METADATA_DISABLED", "false".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    /// The value of one variable of [`environment`](Self::environment).
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        let found = self.environment().into_iter().find(|(variable, _)| variable == name);
        found.map(|(_, value)| value)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Announces a spot interruption; `action` is `terminate`, `stop` or `hibernate`.
    pub(crate) fn interrupt(&self, action: &str, in_seconds: i64) {
        self.state().interruption = Some((action.to_owned(), Timestamp::new(in_seconds)));
    }

    /// Withdraws the interruption.
    pub(crate) fn withdraw(&self) {
        self.state().interruption = None;
    }

    /// Announces a rebalance recommendation.
    pub(crate) fn rebalance(&self) {
        self.state().rebalance = Some(Timestamp::new(0));
    }

    /// Sets the target lifecycle state of the instance's Auto Scaling group.
    pub(crate) fn lifecycle(&self, state: &str) {
        self.state().lifecycle = Some(state.to_owned());
    }

    /// Moves the clock that the mock uses.
    pub(crate) fn advance(&self, by: Duration) {
        self.state().clock_offset += by;
    }

    /// Applies the misbehaviour to every path.
    pub(crate) fn misbehave(&self, misbehaviour: Misbehaviour) {
        self.misbehave_at("", misbehaviour);
    }

    pub(crate) fn misbehave_at(&self, path: &str, misbehaviour: Misbehaviour) {
        self.state().misbehaviours.insert(path.to_owned(), misbehaviour);
    }

    /// Ends all misbehaviour; requests that hang continue to hang.
    pub(crate) fn behave(&self) {
        self.state().misbehaviours.clear();
    }

    /// Expires every token.
    pub(crate) fn forget_tokens(&self) {
        self.state().issued.clear();
    }

    /// States a lifetime of 0 s for new tokens, although they remain valid.
    pub(crate) fn understate_token_ttl(&self) {
        self.state().understates_ttl = true;
    }

    pub(crate) fn tokens_issued(&self) -> usize {
        self.state().issued_count
    }

    /// Number of requests so far, answered or not.
    pub(crate) fn requests(&self, path: &str) -> usize {
        self.state().requests.get(path).copied().unwrap_or(0)
    }

    /// Bytes of endless documents that were sent.
    pub(crate) fn huge_bytes(&self) -> u64 {
        self.state().huge_bytes
    }

    /// Number of open connections.
    pub(crate) fn connections(&self) -> usize {
        self.state().connections
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::SeqCst)
    }

    fn serve(&self, mut socket: TcpStream) -> io::Result<()> {
        socket.set_read_timeout(Some(STOP_POLL_INTERVAL))?;
        socket.set_write_timeout(Some(Duration::from_secs(10)))?;
        let mut unread = Vec::new();
        while let Some(request) = self.receive(&mut socket, &mut unread)? {
            let (misbehaviour, response, is_mock) = {
                let mut state = self.state();
                *state.requests.entry(request.path.clone()).or_default() += 1;
                let misbehaviour = state.misbehaviour(&request.path);
                (misbehaviour, state.response(&request), state.is_mock)
            };
            let response = match misbehaviour {
                None | Some(Misbehaviour::Drip) => response,
                Some(Misbehaviour::Hang) => return self.wait_for_end(&mut socket),
                Some(Misbehaviour::Drop) => return Ok(()),
                Some(Misbehaviour::Status(status)) => Response::page(status),
                Some(Misbehaviour::Unauthorized) => Response::page(401),
                Some(Misbehaviour::Garbage) => Response::document("{\"action\": \"term".to_owned()),
                Some(Misbehaviour::Huge) => return self.send_without_end(&mut socket),
            };
            let bytes = response.encode(is_mock);
            let piece = if misbehaviour == Some(Misbehaviour::Drip) { 1 } else { bytes.len() };
            for piece in bytes.chunks(piece) {
                if piece.len() < bytes.len() {
                    thread::sleep(Duration::from_millis(50));
                }
                if self.is_stopped() {
                    return Ok(());
                }
                socket.write_all(piece)?;
            }
            if !is_mock {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The next request; `None` at the end of the connection. Requests have no body here.
    fn receive(&self, socket: &mut TcpStream, unread: &mut Vec<u8>) -> io::Result<Option<Request>> {
        loop {
            if let Some(end) = unread.windows(4).position(|window| window == b"\r\n\r\n") {
                let head: Vec<u8> = unread.drain(..end + 4).collect();
                return Ok(Request::parse(&String::from_utf8_lossy(&head)));
            }
            if !self.read_more(socket, unread)? {
                return Ok(None);
            }
        }
    }

    /// Reads once; false at the end of the stream, or when the service is stopped.
    fn read_more(&self, socket: &mut TcpStream, unread: &mut Vec<u8>) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        match socket.read(&mut buffer) {
            Ok(0) => Ok(false),
            Ok(count) => {
                unread.extend_from_slice(&buffer[..count]);
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Ok(!self.is_stopped())
            }
            Err(error) => Err(error),
        }
    }

    fn wait_for_end(&self, socket: &mut TcpStream) -> io::Result<()> {
        while self.read_more(socket, &mut Vec::new())? {}
        Ok(())
    }

    fn send_without_end(&self, socket: &mut TcpStream) -> io::Result<()> {
        socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1099511627776\r\n\r\n")?;
        let block = [b'x'; 16 * 1024];
        while !self.is_stopped() {
            socket.write_all(&block)?;
            self.state().huge_bytes += block.len() as u64;
        }
        Ok(())
    }
}

impl State {
    fn misbehaviour(&self, path: &str) -> Option<Misbehaviour> {
        use Misbehaviour::{Garbage, Huge, Unauthorized};
        let misbehaviour = self.misbehaviours.get(path).or_else(|| self.misbehaviours.get(""));
        let of_documents =
            |misbehaviour: &Misbehaviour| matches!(misbehaviour, Garbage | Huge | Unauthorized);
        misbehaviour.copied().filter(|misbehaviour| path != TOKEN || !of_documents(misbehaviour))
    }

    fn response(&mut self, request: &Request) -> Response {
        if request.path == TOKEN {
            return self.issue(request);
        }
        if request.method != "GET" {
            return Response::page(405);
        }
        let is_valid =
            |token: &String| self.issued.get(token).is_some_and(|until| Instant::now() < *until);
        let is_authorized = match request.headers.get("x-aws-ec2-metadata-token") {
            Some(token) => is_valid(token),
            None => self.tokens == Tokens::Optional,
        };
        if !is_authorized {
            return Response::page(401);
        }
        self.document(&request.path).map_or_else(|| Response::page(404), Response::document)
    }

    fn issue(&mut self, request: &Request) -> Response {
        if request.method != "PUT" {
            return Response::page(405);
        }
        // EC2 refuses requests that came through a proxy; the mock does not.
        if !self.is_mock && request.headers.contains_key("x-forwarded-for") {
            return Response::page(403);
        }
        let ttl = request.headers.get("x-aws-ec2-metadata-token-ttl-seconds");
        let ttl = ttl.and_then(|ttl| ttl.parse::<u64>().ok());
        let Some(ttl) = ttl.filter(|ttl| (1..=21_600).contains(ttl)) else {
            return Response::page(400);
        };
        self.issued_count += 1;
        let token = format!("AQAEAtoken{:06}==", self.issued_count);
        self.issued.insert(token.clone(), Instant::now() + Duration::from_secs(ttl));
        let ttl = if self.understates_ttl { 0 } else { ttl };
        let mut response = Response::document(token);
        response.headers.push(("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", ttl.to_string()));
        response
    }

    fn now_of_mock(&self) -> Option<SystemTime> {
        self.is_mock.then(|| SystemTime::now() + self.clock_offset)
    }

    fn document(&self, path: &str) -> Option<String> {
        match path {
            INTERRUPTION => {
                let (action, timestamp) = self.interruption.as_ref()?;
                let time = timestamp.text(self.now_of_mock());
                Some(format!("{{\n\t\"action\": \"{action}\",\n\t\"time\": \"{time}\"\n}}"))
            }
            REBALANCE => {
                let time = self.rebalance?.text(self.now_of_mock());
                Some(format!("{{\"noticeTime\": \"{time}\"}}"))
            }
            LIFECYCLE => self.lifecycle.clone(),
            _ => None,
        }
    }
}

impl Timestamp {
    fn new(in_seconds: i64) -> Self {
        Self { set: SystemTime::now(), in_seconds }
    }

    /// As RFC 3339; the mock adds the seconds to the time of each request.
    fn text(self, now_of_mock: Option<SystemTime>) -> String {
        let from = now_of_mock.unwrap_or(self.set);
        let distance = Duration::from_secs(self.in_seconds.unsigned_abs());
        let time = if self.in_seconds < 0 { from - distance } else { from + distance };
        humantime::format_rfc3339_seconds(time).to_string()
    }
}

impl Request {
    fn parse(head: &str) -> Option<Self> {
        let mut lines = head.lines();
        let mut first = lines.next()?.split(' ');
        let (method, path) = (first.next()?.to_owned(), first.next()?.to_owned());
        let headers = lines.filter_map(|line| line.split_once(':'));
        let headers = headers
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        Some(Self { method, path, headers })
    }
}

impl Response {
    fn document(body: String) -> Self {
        Self { status: 200, headers: vec![("Content-Type", "text/plain".to_owned())], body }
    }

    /// An error page.
    fn page(status: u16) -> Self {
        let title = format!("{status} - {}", reason(status));
        let page = format!(
            "<?xml version=\"1.0\" encoding=\"iso-8859-1\"?>\n<html lang=\"en\">\n <head>\n  \
             <title>{title}</title>\n </head>\n <body>\n  <h1>{title}</h1>\n </body>\n</html>\n"
        );
        Self { status, headers: vec![("Content-Type", "text/html".to_owned())], body: page }
    }

    fn encode(&self, is_mock: bool) -> Vec<u8> {
        let mut text = format!("HTTP/1.1 {} {}\r\n", self.status, reason(self.status));
        for (name, value) in &self.headers {
            text += &format!("{name}: {value}\r\n");
        }
        text += &format!("Content-Length: {}\r\n", self.body.len());
        if !is_mock {
            text += "Server: EC2ws\r\nConnection: close\r\n";
        }
        (text + "\r\n" + &self.body).into_bytes()
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Not Allowed",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        _ => "Unknown",
    }
}
