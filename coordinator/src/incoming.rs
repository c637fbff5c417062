//! Connections as they come.
//!
//! Each takes a file descriptor, of which a process has only so many, and the journal and the store need some too. So
//! one that says nothing is not kept, and when there are as many as there may be, others wait in the listener's queue.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::Stream;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TcpConnectInfo};
use tracing::warn;

/// Longest wait for a client's first word, which in HTTP and TLS is the client's to say.
const SILENCE: Duration = Duration::from_secs(10);
/// Until the listener is asked again after a failure.
const PAUSE: Duration = Duration::from_millis(200);
/// Connections that have spoken and that the server has not taken yet.
const QUEUE: usize = 64;
/// Connections that wait to be taken, as far as the system allows: thousands of agents may come at the same moment, and
/// one that finds the queue full tries again after a second. The standard library's is 128.
const BACKLOG: u32 = 4_096;
/// Files that this process opens besides.
const RESERVED: u64 = 64;

/// A client that has begun to speak.
pub(crate) struct Client {
    stream: TcpStream,
    /// Given back when it is gone.
    _place: OwnedSemaphorePermit,
}

/// Takes an address. To be called in a tokio runtime.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Connections of a coordinator that has just ended do not keep its successor from the port.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Clients as they come. To be called in a tokio runtime; nobody is let in any more once the stream is dropped.
///
/// Lets this process open as many files as it may: systems begin with some 1,000, and each agent takes two.
pub(crate) fn incoming(listener: TcpListener) -> impl Stream<Item = io::Result<Client>> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let limit = if raised.is_ok() { maximum } else { current };
    let most = limit.unwrap_or(u64::MAX).saturating_sub(RESERVED).max(1);
    let most = usize::try_from(most).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
    let (spoken, taken) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let over = spoken.clone();
        tokio::select! {
            () = accept(listener, most, spoken) => {}
            () = over.closed() => {}
        }
    });
    ReceiverStream::new(taken)
}

async fn accept(listener: TcpListener, most: usize, spoken: mpsc::Sender<io::Result<Client>>) {
    let places = Arc::new(Semaphore::new(most));
    let (mut full, mut failed) = (false, false);
    loop {
        if places.available_permits() == 0 && !std::mem::replace(&mut full, true) {
            warn!(
                "new connections wait, as {most} are open: close some, or raise the limit of open files (ulimit -Hn, \
                 LimitNOFILE of a systemd unit) and restart"
            );
        }
        // It is never closed.
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(hear(Client { stream, _place: place }, spoken.clone()));
            }
            // What happened to one connection is over with it; a machine out of files or memory may stay so.
            Err(error) => {
                if !std::mem::replace(&mut failed, true) {
                    warn!(%error, "a connection cannot be taken, and is asked for again; later ones are not told");
                }
                sleep(PAUSE).await;
            }
        }
    }
}

/// Passes a client on once it has said something.
async fn hear(client: Client, spoken: mpsc::Sender<io::Result<Client>>) {
    match timeout(SILENCE, client.stream.peek(&mut [0])).await {
        Ok(Ok(1)) => {}
        _ => return,
    }
    // Answers are written whole: waiting for more of them only delays them.
    let ready = client.stream.set_nodelay(true).map(|()| client);
    // The server may have ended.
    let _ = spoken.send(ready).await;
}

impl Connected for Client {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Client {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
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
