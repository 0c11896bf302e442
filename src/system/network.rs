//! How many bytes have moved: over this process's own TCP connections, and through the host's InfiniBand, Omni-Path and EFA ports, which
//! bypass the system.

use std::fs;
use std::path::Path;

/// Where in `struct tcp_info` Linux has the bytes that the other end has acknowledged, and behind them those received.
const ACKNOWLEDGED: usize = 120;
const PORTS: &str = "/sys/class/infiniband";
/// Counters of a port, in its folder; those of InfiniBand count words of four bytes.
const COUNTERS: [&str; 4] =
    ["counters/port_xmit_data", "counters/port_rcv_data", "hw_counters/tx_bytes", "hw_counters/rx_bytes"];

/// What has moved, in bytes or a fourth of them, since some time.
pub fn moved() -> u64 {
    sockets().map(connection).chain(ports()).fold(0, u64::wrapping_add)
}

fn names(folder: impl AsRef<Path>) -> impl Iterator<Item = std::path::PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn sockets() -> impl Iterator<Item = i32> {
    names("/proc/self/fd").filter_map(|path| {
        let target = fs::read_link(&path).ok()?;
        target.to_str()?.starts_with("socket:").then(|| path.file_name()?.to_str()?.parse().ok())?
    })
}

/// The bytes of a connection; 0: it is none of TCP's.
fn connection(socket: i32) -> u64 {
    let mut info = [0u8; ACKNOWLEDGED + 16];
    let mut length = info.len() as libc::socklen_t;
    // SAFETY: the system writes so many bytes at most. What is no socket any more, or another one, is an error or another number.
    let code = unsafe {
        let to = info.as_mut_ptr().cast();
        libc::getsockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, to, &raw mut length)
    };
    if code != 0 || (length as usize) < info.len() {
        return 0;
    }
    let number = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| info[at + i]));
    number(ACKNOWLEDGED).wrapping_add(number(ACKNOWLEDGED + 8))
}

fn ports() -> impl Iterator<Item = u64> {
    let ports = names(PORTS).flat_map(|device| names(device.join("ports")));
    ports.flat_map(|port| {
        COUNTERS
            .into_iter()
            .filter_map(move |name| fs::read_to_string(port.join(name)).ok()?.trim().parse::<u64>().ok())
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn what_a_connection_carries_is_counted_at_both_ends() {
        const COUNT: usize = 100_000;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let before = moved();
        client.write_all(&[0; COUNT]).unwrap();
        server.read_exact(&mut [0; COUNT]).unwrap();
        while moved().wrapping_sub(before) < 2 * COUNT as u64 {
            std::thread::yield_now();
        }
    }
}
