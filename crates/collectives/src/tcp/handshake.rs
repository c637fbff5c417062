//! How the ranks of one generation find each other.
//!
//! Every rank dials all lower ones and is dialled by all higher ones. Both sides of a connection say
//! who they are and whom they want ([`Hello`]), and both compare. Whoever dialled the wrong one
//! fails, as his plan is wrong; whoever was dialled by the wrong one hangs up and keeps waiting, as
//! anybody can dial: ranks of older generations, port scanners, health checks.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};

use baton_job::Rank;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use super::mesh::{closed, now_or_later};
use super::wait::Limit;
use super::wire::Hello;
use crate::{Error, Membership, operation};

/// So many callers beside those who are awaited may be silent at a time; one more, and the first of all is hung up on.
const MAX_STRANGERS: usize = 256;

/// Connects `me` with everybody; the streams are indexed by rank and do not block.
pub(super) fn meet(
    listener: TcpListener,
    me: Membership,
    addresses: &[String],
    limit: &Limit<'_>,
) -> Result<Vec<Option<TcpStream>>, Error> {
    listener.set_nonblocking(true).map_err(Error::io(operation::CONNECT))?;
    let lower = (0..me.rank.0).map(Rank).zip(addresses);
    let dialled =
        lower.map(|(peer, address)| Call::dial(peer, address)).collect::<Result<_, _>>()?;
    let met = addresses.iter().map(|_| None).collect();
    let mut meeting = Meeting { me, met, dialled, callers: Vec::new() };
    while let Some(missing) = meeting.first_missing() {
        let mut sockets = vec![(listener.as_fd(), PollFlags::IN)];
        sockets.extend(meeting.dialled.iter().map(|(_, call)| call.interest()));
        sockets.extend(meeting.callers.iter().map(Call::interest));
        let ready = limit.wait(&sockets, missing)?;

        let (dialled, callers) = ready[1..].split_at(meeting.dialled.len());
        meeting.hear_callers(callers);
        meeting.hear_dialled(dialled)?;
        if ready[0] {
            meeting.accept(&listener)?;
        }
    }
    Ok(meeting.met)
}

/// Who is there and who is not.
struct Meeting {
    me: Membership,
    met: Vec<Option<TcpStream>>,
    dialled: Vec<(Rank, Call)>,
    callers: Vec<Call>,
}

impl Meeting {
    fn first_missing(&self) -> Option<Rank> {
        let is_missing = |rank: &Rank| *rank != self.me.rank && self.met[rank.0 as usize].is_none();
        (0..self.me.world_size).map(Rank).find(is_missing)
    }

    /// What a peer should say.
    fn expected(&self, peer: Rank) -> Hello {
        Hello { from: Membership { rank: peer, ..self.me }, to: self.me.rank }
    }

    fn hear_dialled(&mut self, ready: &[bool]) -> Result<(), Error> {
        for ((peer, mut call), ready) in std::mem::take(&mut self.dialled).into_iter().zip(ready) {
            let lost =
                |source| Error::LostPeer { rank: peer, operation: operation::CONNECT, source };
            if !ready {
                self.dialled.push((peer, call));
                continue;
            }
            if call.greets_first {
                call.greet(Hello { from: self.me, to: peer }).map_err(lost)?;
            }
            match call.hear().map_err(lost)? {
                None => self.dialled.push((peer, call)),
                Some(hello) if hello == self.expected(peer) => {
                    self.met[peer.0 as usize] = Some(call.stream);
                }
                Some(hello) => {
                    let expected = self.expected(peer).from;
                    return Err(Error::Refused { expected, got: hello.from });
                }
            }
        }
        Ok(())
    }

    /// A caller's failure is his own affair.
    fn hear_callers(&mut self, ready: &[bool]) {
        for (mut call, ready) in std::mem::take(&mut self.callers).into_iter().zip(ready) {
            if !ready {
                self.callers.push(call);
                continue;
            }
            match call.hear() {
                Ok(None) => self.callers.push(call),
                Ok(Some(hello)) => self.answer(call, hello),
                Err(_) => {}
            }
        }
    }

    /// Tells a caller who we are, so that he knows why if we hang up then.
    fn answer(&mut self, mut call: Call, hello: Hello) {
        let peer = hello.from.rank;
        let answered = call.greet(Hello { from: self.me, to: peer }).is_ok();
        let is_awaited = peer > self.me.rank && hello == self.expected(peer);
        if answered
            && is_awaited
            && let Some(place @ None) = self.met.get_mut(peer.0 as usize)
        {
            *place = Some(call.stream);
        }
    }

    /// How many have yet to call.
    fn awaited(&self) -> usize {
        self.met.iter().skip(self.me.rank.0 as usize + 1).filter(|place| place.is_none()).count()
    }

    fn accept(&mut self, listener: &TcpListener) -> Result<(), Error> {
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    if self.callers.len() >= self.awaited() + MAX_STRANGERS {
                        self.callers.remove(0);
                    }
                    self.callers.extend(Call::new(stream, false));
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

/// A connection on which not everything has been said.
struct Call {
    stream: TcpStream,
    /// Whether our hello is still to be said, which needs a connection first.
    greets_first: bool,
    /// What has come of the other side's hello.
    heard: [u8; Hello::SIZE],
    heard_bytes: usize,
}

impl Call {
    /// Begins to connect, without waiting for it.
    fn dial(peer: Rank, address: &str) -> Result<(Rank, Self), Error> {
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
        begin().map(|call| (peer, call)).map_err(|source: io::Error| {
            let source = io::Error::new(source.kind(), format!("{address}: {source}"));
            Error::LostPeer { rank: peer, operation: operation::CONNECT, source }
        })
    }

    fn new(stream: TcpStream, greets_first: bool) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, greets_first, heard: [0; Hello::SIZE], heard_bytes: 0 })
    }

    fn interest(&self) -> (BorrowedFd<'_>, PollFlags) {
        let flags = if self.greets_first { PollFlags::OUT } else { PollFlags::IN };
        (self.stream.as_fd(), flags)
    }

    /// Says our hello. It always fits into a new connection's send buffer.
    fn greet(&mut self, hello: Hello) -> io::Result<()> {
        self.greets_first = false;
        self.stream.write_all(&hello.encode())
    }

    /// The other side's hello, if all of it has come.
    fn hear(&mut self) -> io::Result<Option<Hello>> {
        while self.heard_bytes < Hello::SIZE {
            match now_or_later(self.stream.read(&mut self.heard[self.heard_bytes..]))? {
                None => return Ok(None),
                Some(0) => return Err(closed()),
                Some(count) => self.heard_bytes += count,
            }
        }
        match Hello::decode(&self.heard) {
            Some(hello) => Ok(Some(hello)),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "it is no Baton rank")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use baton_job::Generation;

    use super::*;

    /// As in a large group, where all dial rank 0 at once and it has not heard any of them yet.
    #[test]
    fn no_rank_is_hung_up_on_because_hundreds_call_at_once() {
        const WORLD: u32 = 300;
        let me =
            Membership { protocol: 1, generation: Generation(1), rank: Rank(0), world_size: WORLD };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let met = (0..WORLD).map(|_| None).collect();
        let mut meeting = Meeting { me, met, dialled: Vec::new(), callers: Vec::new() };
        let mut callers: Vec<(Rank, TcpStream)> = Vec::new();
        for rank in (1..WORLD).map(Rank) {
            callers.push((rank, TcpStream::connect(address).unwrap()));
            meeting.accept(&listener).unwrap();
        }
        for (rank, stream) in &mut callers {
            let hello = Hello { from: Membership { rank: *rank, ..me }, to: Rank(0) };
            stream.write_all(&hello.encode()).unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        while let Some(missing) = meeting.first_missing() {
            assert!(Instant::now() < deadline, "rank {missing:?} was hung up on");
            let ready = vec![true; meeting.callers.len()];
            meeting.hear_callers(&ready);
            meeting.accept(&listener).unwrap();
        }
    }
}
