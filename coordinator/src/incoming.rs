//! Accepts connections.
//!
//! Each connection takes a file descriptor, and their number is limited; the journal and the store need some too. So
//! the server closes a connection on which the client sends nothing at first, or nothing is sent in either direction for
//! some time; and at the limit new connections wait in the listener's queue.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    os::fd::AsFd,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::Stream;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf, copy, sink},
    net::{TcpListener, TcpSocket, TcpStream},
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{Instant, Sleep, sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TcpConnectInfo};
use tracing::warn;

/// Longest wait for the first byte of a client. In HTTP and TLS the client sends first.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time in which nothing is sent in either direction. It ends connections whose client stops after the TLS
/// handshake, or within a request. The server pings HTTP/2 clients, and the dashboard's stream has comments, more often.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time in which the input of a connection that the server has given up is still read.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);
/// Wait before the next accept after a failed one.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Capacity of the queue of connections that have sent a byte and that the server has not taken yet.
const READY_QUEUE_LEN: usize = 64;
/// Connections that may wait to be accepted, as far as the system allows: thousands of agents may connect at the same
/// moment, and an agent that finds the queue full retries only after a second. The standard library's value is 128.
const LISTEN_BACKLOG: u32 = 4_096;
/// File descriptors reserved for the other files of this process.
const RESERVED_FILES: u64 = 64;
/// Connections that the smallest job needs: two of each agent, `baton up`, and some people and programs that watch.
const MIN_CONNECTIONS: u64 = 16;

/// A connection on which the client has sent at least one byte.
pub(crate) struct Connection {
    stream: TcpStream,
    idle: IdleTimer,
    /// Counts this connection against the limit until it is closed.
    permit: Option<OwnedSemaphorePermit>,
}

impl Connection {
    fn new(stream: TcpStream, permit: OwnedSemaphorePermit, idle_timeout: Duration) -> Self {
        Self { stream, idle: IdleTimer::new(idle_timeout), permit: Some(permit) }
    }

    /// The result of an attempt to send or receive, of which `is_progress` says whether any byte was.
    fn checked<T>(
        &mut self,
        context: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
        is_progress: bool,
    ) -> Poll<io::Result<T>> {
        if is_progress {
            self.idle.restart();
        }
        if polled.is_pending() && self.idle.poll_expired(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled
    }
}

/// Ends the connection, but still reads what the client sends until the client closes it too. If input were left unread,
/// the system would reset the connection, and the client could lose what was sent last: in TLS, the alert that says why
/// its certificate is refused.
impl Drop for Connection {
    fn drop(&mut self) {
        let (Ok(runtime), Ok(socket)) =
            (Handle::try_current(), self.stream.as_fd().try_clone_to_owned())
        else {
            return;
        };
        let permit = self.permit.take();
        runtime.spawn(async move {
            let mut stream = TcpStream::from_std(socket.into())?;
            stream.shutdown().await?;
            let _ = timeout(LINGER_TIMEOUT, copy(&mut stream, &mut sink())).await;
            drop(permit);
            io::Result::Ok(())
        });
    }
}

/// Notices that nothing was sent in either direction.
struct IdleTimer {
    timeout: Duration,
    last_progress: Instant,
    /// Set again only when it ends, because that costs more than to store a time.
    sleep: Pin<Box<Sleep>>,
}

impl IdleTimer {
    fn new(timeout: Duration) -> Self {
        Self { timeout, last_progress: Instant::now(), sleep: Box::pin(sleep(timeout)) }
    }

    fn restart(&mut self) {
        self.last_progress = Instant::now();
    }

    /// Whether the time is over; if not, wakes the task when it may be.
    fn poll_expired(&mut self, context: &mut Context<'_>) -> bool {
        while self.sleep.as_mut().poll(context).is_ready() {
            let end = self.last_progress + self.timeout;
            if end <= Instant::now() {
                return true;
            }
            self.sleep.as_mut().reset(end);
        }
        false
    }
}

/// Binds an address and listens on it. Must be called in a tokio runtime.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Otherwise old connections of a coordinator that has just ended would block this port for the next one.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(LISTEN_BACKLOG)
}

/// Number of connections that this process can serve.
///
/// Raises its limit of open files to the maximum: the usual default is about 1,000, and each agent takes two.
///
/// # Errors
/// The limit is too low to serve even a small job; the text has the remedy.
pub(crate) fn max_connections() -> Result<usize, String> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let limit = if raised.is_ok() { maximum } else { current }.unwrap_or(u64::MAX);
    let connections = limit.saturating_sub(RESERVED_FILES);
    if connections < MIN_CONNECTIONS {
        return Err(format!(
            "this process may open only {limit} files, and a coordinator needs {}: raise the limit (ulimit -Hn, \
             LimitNOFILE of a systemd unit)",
            RESERVED_FILES + MIN_CONNECTIONS
        ));
    }
    Ok(usize::try_from(connections).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS))
}

/// Stream of accepted clients, of which at most `max_connections` are open at the same time. Must be called in a tokio
/// runtime. Dropping the stream stops accepting.
pub(crate) fn incoming(
    listener: TcpListener,
    max_connections: usize,
) -> impl Stream<Item = io::Result<Connection>> {
    let (ready, clients) = mpsc::channel(READY_QUEUE_LEN);
    tokio::spawn(async move {
        let stopped = ready.clone();
        tokio::select! {
            () = accept(listener, max_connections, ready) => {}
            () = stopped.closed() => {}
        }
    });
    ReceiverStream::new(clients)
}

async fn accept(
    listener: TcpListener,
    max_connections: usize,
    ready: mpsc::Sender<io::Result<Connection>>,
) {
    let permits = Arc::new(Semaphore::new(max_connections));
    let (mut full_logged, mut failure_logged) = (false, false);
    loop {
        if permits.available_permits() == 0 && !std::mem::replace(&mut full_logged, true) {
            warn!(
                "new connections wait because {max_connections} are open: close some, or raise the limit of open \
                 files (ulimit -Hn, LimitNOFILE of a systemd unit) and restart"
            );
        }
        // The semaphore is never closed.
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(wait_for_first_byte(
                    Connection::new(stream, permit, IDLE_TIMEOUT),
                    ready.clone(),
                ));
            }
            // An error of one connection affects only that one, but lack of files or memory may last.
            Err(error) => {
                if !std::mem::replace(&mut failure_logged, true) {
                    warn!(%error, "cannot accept a connection; retrying, and later failures are not logged");
                }
                sleep(ACCEPT_RETRY_INTERVAL).await;
            }
        }
    }
}

/// Passes a client on once it has sent a byte.
async fn wait_for_first_byte(client: Connection, ready: mpsc::Sender<io::Result<Connection>>) {
    match timeout(FIRST_BYTE_TIMEOUT, client.stream.peek(&mut [0])).await {
        Ok(Ok(1)) => {}
        _ => return,
    }
    // Each answer is written in one call, so waiting to batch several would only delay them.
    let client = client.stream.set_nodelay(true).map(|()| client);
    // The server may have ended.
    let _ = ready.send(client).await;
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.checked(context, polled, buffer.filled().len() > before)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        let is_progress = matches!(polled, Poll::Ready(Ok(1..)));
        self.checked(context, polled, is_progress)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        let is_progress = matches!(polled, Poll::Ready(Ok(1..)));
        self.checked(context, polled, is_progress)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn a_connection_without_traffic_is_closed() {
        let listener = listen(([127, 0, 0, 1], 0).into()).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let permit = Arc::new(Semaphore::new(1)).acquire_owned().await.unwrap();
        let mut connection = Connection::new(stream, permit, Duration::from_millis(50));
        // Each byte starts the time again.
        for _ in 0..3 {
            client.write_all(b"x").await.unwrap();
            assert_eq!(connection.read_u8().await.unwrap(), b'x');
        }
        let last = Instant::now();

        let closed = connection.read_u8().await.unwrap_err();

        assert_eq!(closed.kind(), io::ErrorKind::TimedOut);
        assert!(last.elapsed() >= Duration::from_millis(40), "{:?}", last.elapsed());
    }

    #[tokio::test]
    async fn a_client_receives_the_last_words_of_a_connection_whose_input_is_not_read() {
        let listener = listen(([127, 0, 0, 1], 0).into()).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let permits = Arc::new(Semaphore::new(1));
        let permit = permits.clone().acquire_owned().await.unwrap();
        let mut connection = Connection::new(stream, permit, Duration::from_secs(60));
        client.write_all(b"not read").await.unwrap();
        connection.write_all(b"refused").await.unwrap();

        drop(connection);

        client.write_all(b"not read either").await.unwrap();
        let mut received = Vec::new();
        client.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"refused");
        assert_eq!(permits.available_permits(), 0, "the connection counts until it is closed");
        drop(client);
        let _permit = permits.acquire().await.unwrap();
    }
}
