//! Settings of every connection.
//!
//! The path MTU is never assumed: a connection starts with the datagrams that QUIC guarantees and probes for larger ones
//! (DPLPMTUD, RFC 8899), up to what UDP can carry. So loopback gets 64 KiB, a network with jumbo frames 9 KB, and the
//! internet 1.4 KB; datagrams that stop to arrive are noticed, and the connection falls back.

use super::{IDLE_MAX, socket::BUFFER_BYTES};
use std::sync::Arc;

/// What every path must carry (RFC 9000, section 14).
pub(super) const DATAGRAM_BYTES_MIN: u16 = 1_200;
/// The largest UDP payload that fits an IPv4 packet.
pub(super) const DATAGRAM_BYTES_MAX: u16 = 65_507;

/// The most that a peer may have under way. No more than a socket's buffer holds: on a fast path the rest would only be lost,
/// and sent again. It allows 400 MB/s per connection at a round trip of 10 ms.
const WINDOW_BYTES: u32 = BUFFER_BYTES as u32;

/// What may be under way before the first acknowledgement. Probes count: with less than the largest of them, all that follows a
/// probe, even the close of the connection, would wait until it is acknowledged or lost.
const INITIAL_WINDOW_BYTES: u64 = 4 * DATAGRAM_BYTES_MAX as u64;

pub(super) fn transport(datagram_bytes_max: u16) -> quinn::TransportConfig {
    let mut discovery = quinn::MtuDiscoveryConfig::default();
    discovery.upper_bound(datagram_bytes_max);
    let mut congestion = quinn::congestion::CubicConfig::default();
    congestion.initial_window(INITIAL_WINDOW_BYTES);
    let mut config = quinn::TransportConfig::default();
    config.congestion_controller_factory(Arc::new(congestion));
    config.mtu_discovery_config(Some(discovery));
    config.max_idle_timeout(Some(IDLE_MAX.try_into().expect("seconds fit a QUIC timeout")));
    config.keep_alive_interval(Some(IDLE_MAX / 4));
    config.stream_receive_window(WINDOW_BYTES.into());
    config.receive_window(WINDOW_BYTES.into());
    config.send_window(64 << 20);
    config.max_concurrent_bidi_streams(64u32.into());
    config.max_concurrent_uni_streams(64u32.into());
    config
}

pub(super) fn endpoint(datagram_bytes_max: u16) -> quinn::EndpointConfig {
    let mut config = quinn::EndpointConfig::default();
    config.max_udp_payload_size(datagram_bytes_max).expect("at least what QUIC demands");
    config
}
