//! Connecting the ranks of one generation.
//!
//! Every rank connects to all lower ranks and accepts connections from all higher ones. Both sides of a connection send
//! their own identity and the rank they expect ([`RankHello`]), and both compare. Then both prove that they know the
//! generation's secret (`proof`):
//!
//! | message | from | content |
//! |---|---|---|
//! | 1 | the connecting side | hello, nonce |
//! | 2 | the accepting side | hello, nonce, proof |
//! | 3 | the connecting side | proof |
//!
//! A wrong answer to an outgoing connection is an error: the list of addresses is wrong. A wrong incoming connection is
//! closed and the wait continues, because any program can connect: ranks of older generations, port scanners, health
//! checks, somebody who wants to take a rank's place. It gets no place before its proof is right.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};

use baton_job::message::MAX_UNREACHED;
use baton_job::{MeshSecret, Rank};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use super::connection::{closed, now_or_later};
use super::proof::{ConnectionEnd, OPENING_BYTES, Opening, PROOF_BYTES, open, prove};
use super::wait::OperationContext;
use super::wire::RankHello;
use crate::{Error, Membership, operation};

/// Maximum number of silent incoming connections in addition to those that are expected; beyond it the oldest is
/// closed.
const MAX_EXTRA_CONNECTIONS: usize = 256;
/// Bytes that the other side sends at most before the first message: its opening and its proof.
const MAX_RECEIVED: usize = OPENING_BYTES + PROOF_BYTES;

/// Connects `me` to all other ranks; the streams are indexed by rank and non-blocking.
pub(super) fn connect_all(
    listener: TcpListener,
    me: Membership,
    addresses: &[String],
    secret: &MeshSecret,
    context: &OperationContext<'_>,
) -> Result<Vec<Option<TcpStream>>, Error> {
    listener.set_nonblocking(true).map_err(Error::io(operation::CONNECT))?;
    let lower = (0..me.rank.0).map(Rank).zip(addresses);
    let outgoing = lower
        .map(|(peer, address)| PendingConnection::open(peer, address))
        .collect::<Result<_, _>>()?;
    let connected = addresses.iter().map(|_| None).collect();
    let mut handshake = Handshake::new(me, secret, connected, outgoing);
    while handshake.missing().next().is_some() {
        let mut sockets = vec![(listener.as_fd(), PollFlags::IN)];
        sockets.extend(handshake.outgoing.iter().map(|(_, connection)| connection.interest()));
        sockets.extend(handshake.incoming.iter().map(PendingConnection::interest));
        let missing = || handshake.missing().take(MAX_UNREACHED).collect();
        let ready = context.wait(&sockets, &missing)?;

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
struct Handshake<'a> {
    me: Membership,
    secret: &'a MeshSecret,
    connected: Vec<Option<TcpStream>>,
    outgoing: Vec<(Rank, PendingConnection)>,
    incoming: Vec<PendingConnection>,
    /// Whether a connection without the secret was logged; later ones are not.
    has_warned: bool,
}

impl<'a> Handshake<'a> {
    fn new(
        me: Membership,
        secret: &'a MeshSecret,
        connected: Vec<Option<TcpStream>>,
        outgoing: Vec<(Rank, PendingConnection)>,
    ) -> Self {
        Self { me, secret, connected, outgoing, incoming: Vec::new(), has_warned: false }
    }

    /// The ranks that are not connected yet.
    fn missing(&self) -> impl Iterator<Item = Rank> {
        let is_missing =
            |rank: &Rank| *rank != self.me.rank && self.connected[rank.0 as usize].is_none();
        (0..self.me.world_size).map(Rank).filter(is_missing)
    }

    /// The hello that `peer` should send.
    fn expected(&self, peer: Rank) -> RankHello {
        RankHello { from: Membership { rank: peer, ..self.me }, to: self.me.rank }
    }

    fn advance_outgoing(&mut self, ready: &[bool]) -> Result<(), Error> {
        let pending = std::mem::take(&mut self.outgoing);
        for ((peer, mut connection), ready) in pending.into_iter().zip(ready) {
            if *ready && self.advance_to(peer, &mut connection)? {
                self.connected[peer.0 as usize] = Some(connection.stream);
            } else {
                self.outgoing.push((peer, connection));
            }
        }
        Ok(())
    }

    /// Continues a connection that this rank has opened to `peer`; true once both have proven themselves.
    fn advance_to(&self, peer: Rank, connection: &mut PendingConnection) -> Result<bool, Error> {
        let lost = |source| Error::LostPeer { rank: peer, operation: operation::CONNECT, source };
        let mine = match connection.sent {
            Some(opening) => opening,
            None => connection.send_opening(RankHello { from: self.me, to: peer }).map_err(lost)?,
        };
        // The hello alone says why a connection is refused; then nothing may follow it.
        if !connection.receive(RankHello::SIZE).map_err(lost)? {
            return Ok(false);
        }
        let (hello, expected) = (connection.hello().map_err(lost)?, self.expected(peer));
        if hello != expected {
            return Err(Error::Refused { expected: expected.from, got: hello.from });
        }
        if !connection.receive(MAX_RECEIVED).map_err(lost)? {
            return Ok(false);
        }
        let theirs = connection.opening();
        if connection.proof() != prove(self.secret, ConnectionEnd::Accepting, &mine, &theirs) {
            return Err(Error::Impostor { rank: peer });
        }
        let proof = prove(self.secret, ConnectionEnd::Connecting, &mine, &theirs);
        connection.stream.write_all(proof.as_bytes()).map_err(lost)?;
        Ok(true)
    }

    /// Continues incoming connections. A failed one is closed; that is not an error of this rank.
    fn advance_incoming(&mut self, ready: &[bool]) {
        let pending = std::mem::take(&mut self.incoming);
        for (mut connection, ready) in pending.into_iter().zip(ready) {
            if !ready {
                self.incoming.push(connection);
                continue;
            }
            match self.advance_from(&mut connection) {
                Ok(None) => self.incoming.push(connection),
                Ok(Some(peer)) if self.is_missing_higher(peer) => {
                    self.connected[peer.0 as usize] = Some(connection.stream);
                }
                Ok(Some(_)) => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    self.warn_once(&connection);
                }
                Err(_) => {}
            }
        }
    }

    /// Continues an incoming connection; returns the rank at its other end once that has proven itself.
    fn advance_from(&self, connection: &mut PendingConnection) -> io::Result<Option<Rank>> {
        // An answer before all of the opening has arrived could be lost: closing a connection discards what was sent if
        // something was not read.
        if !connection.receive(OPENING_BYTES)? {
            return Ok(None);
        }
        let (hello, theirs) = (connection.hello()?, connection.opening());
        let peer = hello.from.rank;
        let mine = match connection.sent {
            Some(opening) => opening,
            None => {
                // Also to a wrong one, so that it can report the reason.
                let mine = connection.send_opening(RankHello { from: self.me, to: peer })?;
                if hello != self.expected(peer) || !self.is_missing_higher(peer) {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let proof = prove(self.secret, ConnectionEnd::Accepting, &theirs, &mine);
                connection.stream.write_all(proof.as_bytes())?;
                mine
            }
        };
        if !connection.receive(MAX_RECEIVED)? {
            return Ok(None);
        }
        if connection.proof() != prove(self.secret, ConnectionEnd::Connecting, &theirs, &mine) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(Some(peer))
    }

    /// Whether `peer` must connect to this rank and has not.
    fn is_missing_higher(&self, peer: Rank) -> bool {
        let entry = self.connected.get(peer.0 as usize);
        peer > self.me.rank && entry.is_some_and(Option::is_none)
    }

    fn warn_once(&mut self, connection: &PendingConnection) {
        if std::mem::replace(&mut self.has_warned, true) {
            return;
        }
        let from = connection.stream.peer_addr().map_or_else(|_| "?".to_owned(), |a| a.to_string());
        tracing::warn!(
            %from,
            "closed a connection that claims to be a rank and does not know this generation's secret: find out what \
             runs there; later ones are not logged"
        );
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

/// A connection whose handshake is not complete.
struct PendingConnection {
    stream: TcpStream,
    /// Whether this rank has opened it: then it sends first, once the connection is established.
    is_outgoing: bool,
    /// What this side has sent first, once it has.
    sent: Option<Opening>,
    /// What the other side has sent, up to `len`: its hello, nonce and proof.
    received: [u8; MAX_RECEIVED],
    len: usize,
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

    fn new(stream: TcpStream, is_outgoing: bool) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, is_outgoing, sent: None, received: [0; MAX_RECEIVED], len: 0 })
    }

    fn interest(&self) -> (BorrowedFd<'_>, PollFlags) {
        let must_send = self.is_outgoing && self.sent.is_none();
        let flags = if must_send { PollFlags::OUT } else { PollFlags::IN };
        (self.stream.as_fd(), flags)
    }

    /// Sends our hello with a new nonce. All that a side sends in a handshake fits into a new connection's send buffer.
    fn send_opening(&mut self, hello: RankHello) -> io::Result<Opening> {
        let opening = open(hello)?;
        self.stream.write_all(&opening)?;
        self.sent = Some(opening);
        Ok(opening)
    }

    /// Reads until `len` bytes have arrived and not beyond them: messages may follow. False if some are missing.
    fn receive(&mut self, len: usize) -> io::Result<bool> {
        while self.len < len {
            match now_or_later(self.stream.read(&mut self.received[self.len..len]))? {
                None => return Ok(false),
                Some(0) => return Err(closed()),
                Some(count) => self.len += count,
            }
        }
        Ok(true)
    }

    /// The other side's hello, after it was received.
    fn hello(&self) -> io::Result<RankHello> {
        let hello = self.received.first_chunk().and_then(RankHello::decode);
        hello.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it is not a Baton rank"))
    }

    /// The other side's opening, after it was received.
    fn opening(&self) -> Opening {
        let mut opening = [0; OPENING_BYTES];
        opening.copy_from_slice(&self.received[..OPENING_BYTES]);
        opening
    }

    /// The other side's proof, after it was received.
    fn proof(&self) -> blake3::Hash {
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(&self.received[OPENING_BYTES..]);
        blake3::Hash::from_bytes(proof)
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
        let secret = MeshSecret::new([7; MeshSecret::BYTES]);
        let mut handshake = Handshake::new(me, &secret, connected, Vec::new());
        let mut clients: Vec<(Rank, TcpStream)> = Vec::new();
        for rank in (1..WORLD).map(Rank) {
            clients.push((rank, TcpStream::connect(address).unwrap()));
            handshake.accept(&listener).unwrap();
        }
        let mut openings = Vec::new();
        for (rank, stream) in &mut clients {
            let hello = RankHello { from: Membership { rank: *rank, ..me }, to: Rank(0) };
            openings.push(open(hello).unwrap());
            stream.write_all(openings.last().unwrap()).unwrap();
        }
        while handshake.incoming.iter().any(|connection| connection.sent.is_none()) {
            let ready = vec![true; handshake.incoming.len()];
            handshake.advance_incoming(&ready);
        }
        for ((_, stream), mine) in clients.iter_mut().zip(&openings) {
            let (mut theirs, mut proof) = ([0; OPENING_BYTES], [0; PROOF_BYTES]);
            stream.read_exact(&mut theirs).unwrap();
            stream.read_exact(&mut proof).unwrap();
            let proof = prove(&secret, ConnectionEnd::Connecting, mine, &theirs);
            stream.write_all(proof.as_bytes()).unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        while handshake.missing().next().is_some() {
            let missing: Vec<Rank> = handshake.missing().collect();
            assert!(Instant::now() < deadline, "ranks {missing:?} were disconnected");
            let ready = vec![true; handshake.incoming.len()];
            handshake.advance_incoming(&ready);
            handshake.accept(&listener).unwrap();
        }
    }
}
