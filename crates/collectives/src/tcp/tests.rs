//! Faulty connections, written by hand because a correct rank does not make them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use rustix::net::{AddressFamily, SocketType, bind, socket};

use super::wire::{MessageHeader, PROTOCOL, RankHello};
use super::*;

const LONG: Duration = Duration::from_secs(60);
const OPTIONS: TcpOptions = TcpOptions { connect_timeout: LONG, operation_timeout: LONG };

/// Rank 0 of 2 in generation 2, not connected yet; the test plays rank 1.
fn rank_0(
    options: TcpOptions,
    abort: AbortHandle,
) -> (String, impl FnOnce() -> Result<TcpCollective, Error> + Send) {
    let listener = Listener::bind("127.0.0.1").unwrap();
    let address = listener.address().to_owned();
    // Rank 0 makes no outgoing connections, so the address of rank 1 does not matter.
    let peers = [address.clone(), String::new()];
    let connect =
        move || TcpCollective::connect(listener, Generation(2), Rank(0), &peers, options, abort);
    (address, connect)
}

fn rank_1(rank_0: &str, generation: u64) -> Result<TcpCollective, Error> {
    let listener = Listener::bind("127.0.0.1").unwrap();
    let peers = [rank_0.to_owned(), listener.address().to_owned()];
    let abort = AbortHandle::new();
    TcpCollective::connect(listener, Generation(generation), Rank(1), &peers, OPTIONS, abort)
}

/// A hand-written connection of rank 1.
fn rank_1_by_hand(rank_0: &str) -> TcpStream {
    let mut stream = TcpStream::connect(rank_0).unwrap();
    let from =
        Membership { protocol: PROTOCOL, generation: Generation(2), rank: Rank(1), world_size: 2 };
    stream.write_all(&RankHello { from, to: Rank(0) }.encode()).unwrap();
    let mut answer = [0; RankHello::SIZE];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(RankHello::decode(&answer).unwrap().from, Membership { rank: Rank(0), ..from });
    stream
}

/// Rank 0 of 2 adds up `values` with rank 1's.
fn all_reduce(rank_0: &mut TcpCollective, values: &mut [f32]) -> Result<(), Error> {
    let part = Part { node: TreeNode::leaf(0), buffer: BufferMut::Host(values) };
    rank_0.all_reduce(2, &mut [part])
}

#[test]
fn garbage_silence_and_stale_generations_do_not_disturb_the_handshake() {
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    std::thread::scope(|scope| {
        let connected = scope.spawn(connect);
        let _silent = TcpStream::connect(&address).unwrap();
        let mut garbage = TcpStream::connect(&address).unwrap();
        garbage.write_all(&[0xff; 4096]).unwrap();
        drop(TcpStream::connect(&address).unwrap());

        let refused = rank_1(&address, 1).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "connect: expected rank 0 of 2 in generation 1 (protocol 1), found rank 0 of 2 in \
             generation 2 (protocol 1); wait for the coordinator's next generation"
        );

        let mut second = rank_1(&address, 2).unwrap();
        let mut first = connected.join().unwrap().unwrap();
        let other = scope.spawn(move || second.all_gather_bytes(b"one").unwrap());
        let gathered = first.all_gather_bytes(b"zero").unwrap();
        assert_eq!(gathered, [b"zero".to_vec(), b"one".to_vec()]);
        assert_eq!(other.join().unwrap(), gathered);
    });
}

#[test]
fn a_handshake_can_be_aborted() {
    let abort = AbortHandle::new();
    let (_, connect) = rank_0(OPTIONS, abort.clone());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(connect);
        abort.abort();
        let aborted = waiting.join().unwrap();
        assert!(matches!(aborted, Err(Error::Aborted { operation: "connect" })), "{aborted:?}");
    });
}

#[test]
fn a_handshake_has_a_deadline_even_if_a_silent_connection_stays_open() {
    let options = TcpOptions { connect_timeout: Duration::from_millis(30), ..OPTIONS };
    let (address, connect) = rank_0(options, AbortHandle::new());
    let _silent = TcpStream::connect(address).unwrap();
    let late = connect().unwrap_err();
    assert_eq!(late.to_string(), "connect: timed out after 30ms, waiting for rank 1");
}

#[test]
fn a_closed_port_is_a_lost_peer() {
    // Bound but not listening, so that no other program gets the port meanwhile.
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let held = TcpStream::from(socket);
    let lost = rank_1(&held.local_addr().unwrap().to_string(), 2).unwrap_err();
    let Error::LostPeer { rank: Rank(0), operation: "connect", source } = lost else {
        panic!("{lost}");
    };
    assert_eq!(source.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_peer_that_dies_in_the_middle_of_a_message_is_named() {
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| all_reduce(&mut connect().unwrap(), &mut [1.0; 1000]));
        let mut rank_1 = rank_1_by_hand(&address);
        rank_1.write_all(&MessageHeader::new(0, MessageKind::AllReduce, 2, 2000).encode()).unwrap();
        rank_1.write_all(&[0; 1234]).unwrap();
        drop(rank_1);
        let lost = rank_0.join().unwrap();
        assert!(matches!(lost, Err(Error::LostPeer { rank: Rank(1), .. })), "{lost:?}");
    });
}

#[test]
fn a_wrong_length_is_reported_and_not_allocated() {
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| all_reduce(&mut connect().unwrap(), &mut [1.0; 1000]));
        let mut rank_1 = rank_1_by_hand(&address);
        let header = MessageHeader::new(0, MessageKind::AllReduce, 2, 1 << 62);
        rank_1.write_all(&header.encode()).unwrap();
        let refused = rank_0.join().unwrap().unwrap_err();
        assert_eq!(
            refused.to_string(),
            "all_reduce: rank 1 sent all_reduce over 2 virtual ranks with 4611686018427387904 \
             bytes as message 0, expected all_reduce over 2 virtual ranks with 2000 bytes as \
             message 0"
        );
    });
}

#[test]
fn an_abort_ends_an_operation_that_waits_for_a_peer() {
    let abort = AbortHandle::new();
    let (address, connect) = rank_0(OPTIONS, abort.clone());
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| all_reduce(&mut connect().unwrap(), &mut [1.0; 1000]));
        let mut rank_1 = rank_1_by_hand(&address);
        // All data that rank 0 sends: from here on it only waits.
        rank_1.read_exact(&mut [0; MessageHeader::SIZE + 2000]).unwrap();
        abort.abort();
        let aborted = rank_0.join().unwrap();
        assert!(matches!(aborted, Err(Error::Aborted { .. })), "{aborted:?}");
    });
}

#[test]
fn slices_cover_every_length() {
    for len in [0, 1, 7, 1000] {
        for world_size in 1..9 {
            let mut values = vec![0.0; len];
            let slices = split_slices(&mut values, world_size);
            let lengths: Vec<usize> = slices.iter().map(|slice| slice.len()).collect();
            assert_eq!(lengths.iter().sum::<usize>(), len);
            assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1);
        }
    }
}
