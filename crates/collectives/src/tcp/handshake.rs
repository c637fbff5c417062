//! Connecting the ranks of one generation.
//!
//! Every rank connects to all lower ranks and accepts connections from all higher ones. Both sides of a connection send
//! their own identity and the rank they expect ([`RankHello`]), and both compare. A wrong answer to an outgoing
//! connection is an error: the list of addresses is wrong. A wrong incoming connection is closed and the wait
//! continues, because any program can connect: ranks of older generations, port scanners, health checks.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};

use baton_job::Rank;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use super::mesh::{closed, now_or_later};
use super::wait::OperationContext;
use super::wire::RankHello;
use crate::{Error, Membership, operation};

/// Maximum number of silent incoming connections in addition to those that are expected; beyond it the oldest is
/// closed.
const MAX_EXTRA_CONNECTIONS: usize = 256;

/// Connects `me` to all other ranks; the streams are indexed by rank and non-blocking.
pub(super) fn connect_all(
    listener: TcpListener,
    me: Membership,
    addresses: &[String],
    context: &OperationContext<'_>,
) -> Result<Vec<Option<TcpStream>>, Error> {
    listener.set_nonblocking(true).map_err(Error::io(operation::CONNECT))?;
    let lower = (0..me.rank.0).map(Rank).zip(addresses);
    let outgoing = lower
        .map(|(peer, address)| PendingConnection::open(peer, address))
        .collect::<Result<_, _>>()?;
    let connected = addresses.iter().map(|_| None).collect();
    let mut handshake = Handshake { me, connected, outgoing, incoming: Vec::new() };
    while let Some(missing) = handshake.first_missing() {
        let mut sockets = vec![(listener.as_fd(), PollFlags::IN)];
        sockets.extend(handshake.outgoing.iter().map(|(_, connection)| connection.interest()));
        sockets.extend(handshake.incoming.iter().map(PendingConnection::interest));
        let ready = context.wait(&sockets, missing)?;

        let (outgoing, incoming) = ready[1..].split_at(handshake.outgoing.len());
        handshake.advance_incoming(incoming);
        handshake.advance_outgoing(outgoing)?;
        if ready[0] {
            handshake.accept(&listener)?;
        }
    }
    Ok(handshake.connected)
}

/// The connections of one rank while they are being set up.
struct Handshake {
    me: Membership,
    connected: Vec<Option<TcpStream>>,
    outgoing: Vec<(Rank, PendingConnection)>,
    incoming: Vec<PendingConnection>,
}

impl Handshake {
    fn first_missing(&self) -> Option<Rank> {
        let is_missing =
            |rank: &Rank| *rank != self.me.rank && self.connected[rank.0 as usize].is_none();
        (0..self.me.world_size).map(Rank).find(is_missing)
    }

    /// The hello that `peer` should send.
    fn expected(&self, peer: Rank) -> RankHello {
        RankHello { from: Membership { rank: peer, ..self.me }, to: self.me.rank }
    }

    fn advance_outgoing(&mut self, ready: &[bool]) -> Result<(), Error> {
        let pending = std::mem::take(&mut self.outgoing);
        for ((peer, mut connection), ready) in pending.into_iter().zip(ready) {
            let lost =
                |source| Error::LostPeer { rank: peer, operation: operation::CONNECT, source };
            if !ready {
                self.outgoing.push((peer, connection));
                continue;
            }
            if connection.must_send_hello {
                connection.send_hello(RankHello { from: self.me, to: peer }).map_err(lost)?;
            }
            match connection.read_hello().map_err(lost)? {
                None => self.outgoing.push((peer, connection)),
                Some(hello) if hello == self.expected(peer) => {
                    self.connected[peer.0 as usize] = Some(connection.stream);
                }
                Some(hello) => {
                    let expected = self.expected(peer).from;
                    return Err(Error::Refused { expected, got: hello.from });
                }
            }
        }
        Ok(())
    }

    /// Reads from incoming connections. A failed one is closed; that is not an error of this rank.
    fn advance_incoming(&mut self, ready: &[bool]) {
        let pending = std::mem::take(&mut self.incoming);
        for (mut connection, ready) in pending.into_iter().zip(ready) {
            if !ready {
                self.incoming.push(connection);
                continue;
            }
            match connection.read_hello() {
                Ok(None) => self.incoming.push(connection),
                Ok(Some(hello)) => self.answer(connection, hello),
                Err(_) => {}
            }
        }
    }

    /// Sends our hello, so that the other side can report the reason if we then close the connection.
    fn answer(&mut self, mut connection: PendingConnection, hello: RankHello) {
        let peer = hello.from.rank;
        let answered = connection.send_hello(RankHello { from: self.me, to: peer }).is_ok();
        let is_expected = peer > self.me.rank && hello == self.expected(peer);
        if answered
            && is_expected
            && let Some(entry @ None) = self.connected.get_mut(peer.0 as usize)
        {
            *entry = Some(connection.stream);
        }
    }

    /// Number of higher ranks that have not connected yet.
    fn missing_higher_ranks(&self) -> usize {
        let higher = self.connected.iter().skip(self.me.rank.0 as usize + 1);
        higher.filter(|stream| stream.is_none()).count()
    }

    fn accept(&mut self, listener: &TcpListener) -> Result<(), Error> {
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    if self.incoming.len() >= self.missing_higher_ranks() + MAX_EXTRA_CONNECTIONS {
                        self.incoming.remove(0);
                    }
                    self.incoming.extend(PendingConnection::new(stream, false));
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(()),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    _ => return Err(Error::io("accept")(error)),
                },
            }
        }
    }
}

/// A connection whose exchange of hellos is not complete.
struct PendingConnection {
    stream: TcpStream,
    /// Whether our hello is still to be sent; the connection must be established first.
    must_send_hello: bool,
    /// The received bytes of the other side's hello.
    hello: [u8; RankHello::SIZE],
    received: usize,
}

impl PendingConnection {
    /// Starts to connect, without waiting for it.
    fn open(peer: Rank, address: &str) -> Result<(Rank, Self), Error> {
        let begin = || {
            let address = address.to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound)?;
            let family = match address {
                SocketAddr::V4(_) => AddressFamily::INET,
                SocketAddr::V6(_) => AddressFamily::INET6,
            };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = socket_with(family, SocketType::STREAM, flags, None)?;
            match connect(&socket, &address) {
                Ok(()) | Err(Errno::INPROGRESS) => Self::new(TcpStream::from(socket), true),
                Err(errno) => Err(errno.into()),
            }
        };
        begin().map(|connection| (peer, connection)).map_err(|source: io::Error| {
            let source = io::Error::new(source.kind(), format!("{address}: {source}"));
            Error::LostPeer { rank: peer, operation: operation::CONNECT, source }
        })
    }

    fn new(stream: TcpStream, must_send_hello: bool) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, must_send_hello, hello: [0; RankHello::SIZE], received: 0 })
    }

    fn interest(&self) -> (BorrowedFd<'_>, PollFlags) {
        let flags = if self.must_send_hello { PollFlags::OUT } else { PollFlags::IN };
        (self.stream.as_fd(), flags)
    }

    /// Sends our hello. It always fits into a new connection's send buffer.
    fn send_hello(&mut self, hello: RankHello) -> io::Result<()> {
        self.must_send_hello = false;
        self.stream.write_all(&hello.encode())
    }

    /// The other side's hello, if it has arrived completely.
    fn read_hello(&mut self) -> io::Result<Option<RankHello>> {
        while self.received < RankHello::SIZE {
            match now_or_later(self.stream.read(&mut self.hello[self.received..]))? {
                None => return Ok(None),
                Some(0) => return Err(closed()),
                Some(count) => self.received += count,
            }
        }
        match RankHello::decode(&self.hello) {
            Some(hello) => Ok(Some(hello)),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a Baton rank")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use baton_job::Generation;

    use super::*;

    /// This happens in a large group: all ranks connect to rank 0 at the same time, before it has read any hello.
    #[test]
    fn no_rank_is_disconnected_because_hundreds_connect_at_once() {
        const WORLD: u32 = 300;
        let me =
            Membership { protocol: 1, generation: Generation(1), rank: Rank(0), world_size: WORLD };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let connected = (0..WORLD).map(|_| None).collect();
        let mut handshake = Handshake { me, connected, outgoing: Vec::new(), incoming: Vec::new() };
        let mut clients: Vec<(Rank, TcpStream)> = Vec::new();
        for rank in (1..WORLD).map(Rank) {
            clients.push((rank, TcpStream::connect(address).unwrap()));
            handshake.accept(&listener).unwrap();
        }
        for (rank, stream) in &mut clients {
            let hello = RankHello { from: Membership { rank: *rank, ..me }, to: Rank(0) };
            stream.write_all(&hello.encode()).unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        while let Some(missing) = handshake.first_missing() {
            assert!(Instant::now() < deadline, "rank {missing:?} was disconnected");
            let ready = vec![true; handshake.incoming.len()];
            handshake.advance_incoming(&ready);
            handshake.accept(&listener).unwrap();
        }
    }
}
