//! The agent's connection to the coordinator: one stream at a time.

use std::{error::Error as _, sync::Arc, time::Duration};

use baton_access::{
    Bearer, ClientCredentials,
    client::{innermost, tls_problem},
};
use baton_build_info::REVISION;
use baton_job::{
    Time,
    exit::{Failure, bad_input, crash},
    message::AgentReport,
    route::{Destination, Route},
    session::Event,
};
use baton_proto::v1::{self, node_service_client::NodeServiceClient};
use parking_lot::Mutex;
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tonic::{Code, Status, transport::Endpoint};
use tracing::{debug, error, info, warn};

use super::{AgentInput, InputQueue};

/// Receive window of HTTP/2, in bytes.
const RECEIVE_WINDOW_BYTES: u32 = 4 << 20;

/// Makes other calls to the coordinator, outside the stream of reports.
pub(super) struct Caller {
    endpoint: SharedEndpoint,
    bearer: Arc<Mutex<Bearer>>,
}

/// The coordinator that has answered, or else that of the flag.
type SharedEndpoint = Arc<Mutex<Endpoint>>;

impl Caller {
    /// Sends log lines until the stream or the connection ends.
    pub(super) async fn ship_logs(
        &mut self,
        lines: ReceiverStream<v1::ShipLogsRequest>,
    ) -> Result<(), Status> {
        let endpoint = self.endpoint.lock().clone();
        let channel = endpoint.connect().await;
        let channel = channel.map_err(|error| Status::unavailable(innermost(&error)))?;
        let bearer = self.bearer.lock().clone();
        let mut client = NodeServiceClient::with_interceptor(channel, bearer);
        client.ship_logs(lines).await.map(drop)
    }
}

/// Connects to the coordinator, sends reports, and puts what it receives into the agent's queue.
pub(super) struct Uplink {
    route: Route,
    endpoint: SharedEndpoint,
    /// Where the newest connection leads.
    connected_to: Endpoint,
    flag_endpoint: Endpoint,
    /// That of the newest lease whose address can be used.
    lease_endpoint: Option<Endpoint>,
    credentials: ClientCredentials,
    /// Shared with every [`Caller`].
    bearer: Arc<Mutex<Bearer>>,
    stream: Option<JoinHandle<()>>,
    queue: InputQueue,
    outbox: Option<mpsc::UnboundedSender<v1::Frame>>,
    last_error: Arc<Mutex<String>>,
}

impl Uplink {
    pub(super) fn new(
        url: &str,
        credentials: &ClientCredentials,
        queue: InputQueue,
    ) -> Result<Self, Failure> {
        let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let endpoint = endpoint(&url, credentials).map_err(|problem| {
            bad_input(format!("--coordinator {url}: {problem}; e.g. http://10.0.0.1:29600"))
        })?;
        Ok(Self {
            route: Route::new(url),
            endpoint: Arc::new(Mutex::new(endpoint.clone())),
            connected_to: endpoint.clone(),
            flag_endpoint: endpoint,
            lease_endpoint: None,
            bearer: Arc::new(Mutex::new(credentials.bearer())),
            credentials: credentials.clone(),
            queue,
            stream: None,
            outbox: None,
            last_error: Arc::default(),
        })
    }

    /// Whether the coordinator is reached by TLS.
    pub(super) fn has_tls(&self) -> bool {
        self.route.flag().starts_with("https://")
    }

    /// The coordinator's lease has this URL, if there is one. Returns whether a connection has ended for it, without an event.
    pub(super) fn learn(&mut self, now: Time, url: Option<&str>) -> bool {
        if !self.route.learn(url) {
            return self.route.waits_too_long(now) && self.leave_flag();
        }
        let is_secure = |url: &str| !self.has_tls() || url.starts_with("https://");
        let found = match url {
            None => Ok(self.flag_endpoint.clone()),
            Some(url) if is_secure(url) => endpoint(url, &self.credentials),
            // The token must not be sent without encryption because of a file in the store.
            Some(_) => Err("it has no TLS, and that of --coordinator has".to_owned()),
        };
        let url = url.unwrap_or(self.route.flag());
        match found {
            Ok(found) => {
                info!(url, "another coordinator serves the job");
                self.lease_endpoint = Some(found);
                self.end_stream();
                true
            }
            Err(problem) => {
                warn!(url, "the address in the coordinator's lease is not used: {problem}");
                false
            }
        }
    }

    /// The coordinator has answered.
    pub(super) fn welcomed(&mut self) {
        self.connected_to.clone_into(&mut self.endpoint.lock());
        self.route.welcomed();
    }

    /// Ends a connection to the flag's address without an event, if the lease names another one: that is next.
    pub(super) fn leave_flag(&mut self) -> bool {
        let is_at_flag = self.route.leave_flag();
        if is_at_flag {
            self.end_stream();
        }
        is_at_flag
    }

    fn end_stream(&mut self) {
        if let Some(stream) = self.stream.take() {
            stream.abort();
        }
    }

    /// A [`Caller`] for the same coordinator.
    pub(super) fn caller(&self) -> Caller {
        Caller { endpoint: self.endpoint.clone(), bearer: self.bearer.clone() }
    }

    /// Uses this token and these certificates from the next connection on.
    pub(super) fn set_credentials(&mut self, credentials: ClientCredentials) {
        *self.bearer.lock() = credentials.bearer();
        let renewed = |old: &Endpoint| endpoint(&old.uri().to_string(), &credentials).ok();
        if let Some(flag) = renewed(&self.flag_endpoint) {
            self.flag_endpoint = flag;
        }
        if let Some(lease) = self.lease_endpoint.as_ref().and_then(renewed) {
            self.lease_endpoint = Some(lease);
        }
        self.credentials = credentials;
    }

    /// Error of the last failed connection.
    pub(super) fn last_error(&self) -> String {
        self.last_error.lock().clone()
    }

    /// Starts a connection; `Connected` or `Disconnected` follows in the queue.
    pub(super) fn connect(&mut self, now: Time) {
        // There is one stream at a time: this call may follow the end of an older one, which was still in the queue.
        self.end_stream();
        let (outbox, messages) = mpsc::unbounded_channel();
        self.outbox = Some(outbox);
        let lease = match self.route.connect(now) {
            Destination::Flag => None,
            Destination::Lease => self.lease_endpoint.as_ref(),
        };
        let endpoint = lease.unwrap_or(&self.flag_endpoint).clone();
        self.connected_to = endpoint.clone();
        let bearer = self.bearer.lock().clone();
        let queue = self.queue.clone();
        let last_error = self.last_error.clone();
        let stream = tokio::spawn(async move {
            let ended = serve_stream(endpoint, bearer, messages, &queue).await;
            let input = ended.err().map_or(AgentInput::Event(Event::Disconnected), |status| {
                debug!(%status, "disconnected");
                *last_error.lock() = status.message().to_owned();
                refusal(&status).unwrap_or(AgentInput::Event(Event::Disconnected))
            });
            let _ = queue.send(input);
        });
        self.stream = Some(stream);
    }

    /// Sends over the current connection. If it breaks, the report is lost; the hello of the next connection repeats
    /// the state.
    pub(super) fn send(&self, report: AgentReport) {
        let Some(outbox) = &self.outbox else { return };
        match v1::Frame::report(&report, REVISION) {
            Ok(frame) => drop(outbox.send(frame)),
            Err(error) => error!(%error, ?report, "report cannot be encoded"),
        }
    }
}

/// The coordinator at this URL, or what is wrong with it.
fn endpoint(url: &str, credentials: &ClientCredentials) -> Result<Endpoint, String> {
    let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|error| error.to_string())?;
    if !matches!(endpoint.uri().scheme_str(), Some("http" | "https")) {
        return Err("must begin with http:// or https://".to_owned());
    }
    let endpoint = endpoint
        .connect_timeout(Duration::from_secs(3))
        .tcp_nodelay(true)
        // Large enough for one message with the addresses of thousands of ranks.
        .initial_stream_window_size(RECEIVE_WINDOW_BYTES)
        .initial_connection_window_size(RECEIVE_WINDOW_BYTES)
        .http2_keep_alive_interval(Duration::from_secs(5))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true);
    credentials.secure(endpoint).map_err(|error| error.to_string())
}

async fn serve_stream(
    endpoint: Endpoint,
    bearer: Bearer,
    messages: mpsc::UnboundedReceiver<v1::Frame>,
    queue: &InputQueue,
) -> Result<(), Status> {
    let channel = endpoint.connect().await.map_err(|error| match tls_problem(&error) {
        Some(problem) => Status::unauthenticated(problem),
        None => Status::unavailable(innermost(&error)),
    })?;
    let mut client = NodeServiceClient::with_interceptor(channel, bearer);
    // The server answers only after it has received the hello.
    let _ = queue.send(AgentInput::Event(Event::Connected));
    let mut directives = client.attach(UnboundedReceiverStream::new(messages)).await?.into_inner();
    let malformed = |error| Status::internal(format!("malformed directive: {error}"));
    if let Some(first) = directives.message().await? {
        let _ = queue.send(AgentInput::Welcome(first.read().map_err(malformed)?));
    }
    while let Some(frame) = directives.message().await? {
        match frame.read() {
            Ok(directive) => drop(queue.send(AgentInput::Event(Event::Directive(directive)))),
            Err(error) => error!(%error, "malformed directive"),
        }
    }
    Ok(())
}

/// What follows, if the coordinator refuses the agent.
fn refusal(status: &Status) -> Option<AgentInput> {
    // With TLS 1.3 a client learns only after its handshake that its certificate is refused.
    if let Some(problem) = status.source().and_then(tls_problem) {
        return Some(AgentInput::Unauthorized(bad_input(problem)));
    }
    let reason = format!("the coordinator refused this agent: {}", status.message());
    match status.code() {
        // Another agent of this name, which may just have been killed: a new start may succeed.
        Code::AlreadyExists => Some(AgentInput::Refused(crash(reason))),
        Code::FailedPrecondition | Code::InvalidArgument | Code::Unimplemented => {
            Some(AgentInput::Refused(bad_input(reason)))
        }
        Code::PermissionDenied | Code::Unauthenticated => {
            Some(AgentInput::Unauthorized(bad_input(reason)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether an uplink to `flag` uses the address of a lease.
    fn uses(flag: &str, address: &str) -> bool {
        let (queue, _inputs) = mpsc::unbounded_channel();
        let mut uplink = Uplink::new(flag, &ClientCredentials::default(), queue).unwrap();
        uplink.learn(Time(0), Some(address));
        uplink.connect(Time(0));
        let used = uplink.connected_to.uri().to_string();
        used.trim_end_matches('/') == address
    }

    #[tokio::test]
    async fn an_address_of_a_lease_is_used_unless_a_token_would_be_sent_there_without_encryption() {
        assert!(uses("http://10.0.0.5:29600", "http://10.0.0.7:29601"));
        assert!(uses("https://10.0.0.5:29600", "https://10.0.0.7:29601"));
        assert!(!uses("https://10.0.0.5:29600", "http://10.0.0.7:29601"));
        assert!(!uses("http://10.0.0.5:29600", "ftp://10.0.0.7:29601"));
    }
}
