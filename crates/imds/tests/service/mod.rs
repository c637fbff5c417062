//! An instance metadata service on loopback, for tests of any crate: it needs only `humantime`.
//!
//! ```ignore
//! #[path = "../../crates/imds/tests/service/mod.rs"]
//! mod service;
//! ```
//!
//! It behaves like EC2's (tokens are needed, connections are closed after every answer) or like AWS's
//! amazon-ec2-metadata-mock (times slide from request to request, tokens may be optional), and misbehaves
//! on demand.

#![allow(dead_code, reason = "each test uses a part of it")]

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

/// How often a thread that waits looks whether the service has ended.
const TICK: Duration = Duration::from_millis(20);

/// What goes wrong, from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misbehaviour {
    /// No answer ever comes.
    Hang,
    /// The connection is closed instead of an answer.
    Drop,
    /// This status instead of an answer, also to requests for tokens.
    Status(u16),
    /// 401 to every request for a document, whatever its token.
    Unauthorized,
    /// Half a JSON document, also where there is none.
    Garbage,
    /// A document without an end, also where there is none.
    Huge,
    /// The right answer, twenty bytes a second.
    Drip,
}

/// Whether documents are given without a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tokens {
    Required,
    /// IMDSv1 works too.
    Optional,
}

/// The service; it ends when it is dropped.
pub(crate) struct Service {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    is_over: AtomicBool,
    script: Mutex<Script>,
}

struct Script {
    is_mock: bool,
    tokens: Tokens,
    /// How far its clock is ahead of the true time.
    ahead: Duration,
    interruption: Option<(String, Moment)>,
    rebalance: Option<Moment>,
    lifecycle: Option<String>,
    /// By path; "" stands for all.
    misbehaviours: BTreeMap<String, Misbehaviour>,
    /// Until when each is good.
    issued: HashMap<String, Instant>,
    issued_count: usize,
    understates_life: bool,
    requests: BTreeMap<String, usize>,
    huge_bytes: u64,
    connections: usize,
}

/// A time that was set once.
#[derive(Clone, Copy)]
struct Moment {
    set: SystemTime,
    in_seconds: i64,
}

struct Request {
    method: String,
    path: String,
    headers: HashMap<String, String>,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: String,
}

impl Service {
    /// Like EC2's.
    pub(crate) fn start() -> Self {
        Self::start_as(false, Tokens::Required)
    }

    /// Like amazon-ec2-metadata-mock.
    pub(crate) fn start_as_mock(tokens: Tokens) -> Self {
        Self::start_as(true, tokens)
    }

    fn start_as(is_mock: bool, tokens: Tokens) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let script = Script {
            is_mock,
            tokens,
            ahead: Duration::ZERO,
            interruption: None,
            rebalance: None,
            lifecycle: None,
            misbehaviours: BTreeMap::new(),
            issued: HashMap::new(),
            issued_count: 0,
            understates_life: false,
            requests: BTreeMap::new(),
            huge_bytes: 0,
            connections: 0,
        };
        let script = Mutex::new(script);
        let shared = Arc::new(Shared { is_over: AtomicBool::new(false), script });
        let serving = Arc::clone(&shared);
        thread::spawn(move || {
            for socket in listener.incoming() {
                if serving.is_over() {
                    return;
                }
                let (Ok(socket), shared) = (socket, Arc::clone(&serving)) else { continue };
                shared.script().connections += 1;
                thread::spawn(move || {
                    // A client that goes away is no fault of the test.
                    let _ = shared.serve(socket);
                    shared.script().connections -= 1;
                });
            }
        });
        Self { address, shared }
    }

    /// The variables for a process that shall use it.
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        [
            ("AWS_EC2_METADATA_SERVICE_ENDPOINT", format!("http://{}", self.address)),
            ("AWS_EC2_METADATA_DISABLED", "false".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    /// One of [`environment`](Self::environment).
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        let found = self.environment().into_iter().find(|(variable, _)| variable == name);
        found.map(|(_, value)| value)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// A spot interruption: `terminate`, `stop` or `hibernate`.
    pub(crate) fn interrupt(&self, action: &str, in_seconds: i64) {
        self.script().interruption = Some((action.to_owned(), Moment::new(in_seconds)));
    }

    /// No interruption after all.
    pub(crate) fn withdraw(&self) {
        self.script().interruption = None;
    }

    pub(crate) fn rebalance(&self) {
        self.script().rebalance = Some(Moment::new(0));
    }

    /// The instance belongs to an Auto Scaling group, which takes it to this state.
    pub(crate) fn lifecycle(&self, state: &str) {
        self.script().lifecycle = Some(state.to_owned());
    }

    /// Moves its clock, which the mock counts from.
    pub(crate) fn advance(&self, by: Duration) {
        self.script().ahead += by;
    }

    /// At every path.
    pub(crate) fn misbehave(&self, misbehaviour: Misbehaviour) {
        self.misbehave_at("", misbehaviour);
    }

    pub(crate) fn misbehave_at(&self, path: &str, misbehaviour: Misbehaviour) {
        self.script().misbehaviours.insert(path.to_owned(), misbehaviour);
    }

    /// All is well again, but for requests that hang.
    pub(crate) fn behave(&self) {
        self.script().misbehaviours.clear();
    }

    /// As if every token had expired.
    pub(crate) fn forget_tokens(&self) {
        self.script().issued.clear();
    }

    /// Says from now on that tokens end at once, though they do not.
    pub(crate) fn understate_life_of_tokens(&self) {
        self.script().understates_life = true;
    }

    pub(crate) fn tokens_issued(&self) -> usize {
        self.script().issued_count
    }

    /// Requests so far, answered or not.
    pub(crate) fn requests(&self, path: &str) -> usize {
        self.script().requests.get(path).copied().unwrap_or(0)
    }

    /// Bytes of endless documents that clients, or the sockets to them, took.
    pub(crate) fn huge_bytes(&self) -> u64 {
        self.script().huge_bytes
    }

    /// Those that are open.
    pub(crate) fn connections(&self) -> usize {
        self.script().connections
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.shared.script()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn serve(&self, mut socket: TcpStream) -> io::Result<()> {
        socket.set_read_timeout(Some(TICK))?;
        socket.set_write_timeout(Some(Duration::from_secs(10)))?;
        let mut unread = Vec::new();
        while let Some(request) = self.receive(&mut socket, &mut unread)? {
            let (misbehaviour, answer, is_mock) = {
                let mut script = self.script();
                *script.requests.entry(request.path.clone()).or_default() += 1;
                let misbehaviour = script.misbehaviour(&request.path);
                (misbehaviour, script.answer(&request), script.is_mock)
            };
            let answer = match misbehaviour {
                None | Some(Misbehaviour::Drip) => answer,
                Some(Misbehaviour::Hang) => return self.wait_for_end(&mut socket),
                Some(Misbehaviour::Drop) => return Ok(()),
                Some(Misbehaviour::Status(status)) => Answer::page(status),
                Some(Misbehaviour::Unauthorized) => Answer::page(401),
                Some(Misbehaviour::Garbage) => Answer::document("{\"action\": \"term".to_owned()),
                Some(Misbehaviour::Huge) => return self.send_without_end(&mut socket),
            };
            let bytes = answer.encode(is_mock);
            let piece = if misbehaviour == Some(Misbehaviour::Drip) { 1 } else { bytes.len() };
            for piece in bytes.chunks(piece) {
                if piece.len() < bytes.len() {
                    thread::sleep(Duration::from_millis(50));
                }
                if self.is_over() {
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

    /// The next request without its body, which none of ours has; `None` at the end.
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

    /// Whether more can come.
    fn read_more(&self, socket: &mut TcpStream, unread: &mut Vec<u8>) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        match socket.read(&mut buffer) {
            Ok(0) => Ok(false),
            Ok(count) => {
                unread.extend_from_slice(&buffer[..count]);
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Ok(!self.is_over())
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
        while !self.is_over() {
            socket.write_all(&block)?;
            self.script().huge_bytes += block.len() as u64;
        }
        Ok(())
    }
}

impl Script {
    fn misbehaviour(&self, path: &str) -> Option<Misbehaviour> {
        use Misbehaviour::{Garbage, Huge, Unauthorized};
        let misbehaviour = self.misbehaviours.get(path).or_else(|| self.misbehaviours.get(""));
        let of_documents = |it: &Misbehaviour| matches!(it, Garbage | Huge | Unauthorized);
        misbehaviour.copied().filter(|it| path != TOKEN || !of_documents(it))
    }

    fn answer(&mut self, request: &Request) -> Answer {
        if request.path == TOKEN {
            return self.issue(request);
        }
        if request.method != "GET" {
            return Answer::page(405);
        }
        let is_good =
            |token: &String| self.issued.get(token).is_some_and(|until| Instant::now() < *until);
        let is_authorized = match request.headers.get("x-aws-ec2-metadata-token") {
            Some(token) => is_good(token),
            None => self.tokens == Tokens::Optional,
        };
        if !is_authorized {
            return Answer::page(401);
        }
        self.document(&request.path).map_or_else(|| Answer::page(404), Answer::document)
    }

    fn issue(&mut self, request: &Request) -> Answer {
        if request.method != "PUT" {
            return Answer::page(405);
        }
        // What comes through a proxy does not come from this instance. The mock does not care.
        if !self.is_mock && request.headers.contains_key("x-forwarded-for") {
            return Answer::page(403);
        }
        let life = request.headers.get("x-aws-ec2-metadata-token-ttl-seconds");
        let life = life.and_then(|life| life.parse::<u64>().ok());
        let Some(life) = life.filter(|life| (1..=21_600).contains(life)) else {
            return Answer::page(400);
        };
        self.issued_count += 1;
        let token = format!("AQAEAtoken{:06}==", self.issued_count);
        self.issued.insert(token.clone(), Instant::now() + Duration::from_secs(life));
        let life = if self.understates_life { 0 } else { life };
        let mut answer = Answer::document(token);
        answer.headers.push(("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", life.to_string()));
        answer
    }

    fn now_of_mock(&self) -> Option<SystemTime> {
        self.is_mock.then(|| SystemTime::now() + self.ahead)
    }

    fn document(&self, path: &str) -> Option<String> {
        match path {
            INTERRUPTION => {
                let (action, moment) = self.interruption.as_ref()?;
                let time = moment.text(self.now_of_mock());
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

impl Moment {
    fn new(in_seconds: i64) -> Self {
        Self { set: SystemTime::now(), in_seconds }
    }

    /// The mock counts from the time of each request.
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

impl Answer {
    fn document(body: String) -> Self {
        Self { status: 200, headers: vec![("Content-Type", "text/plain".to_owned())], body }
    }

    /// Errors have a page for people.
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
