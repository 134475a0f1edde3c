//! Bytes: flipped, cut, repeated, moved, and numbers at their edges.

use crate::dice::Dice;

const BYTES_MAX: usize = 4 << 20;

pub(crate) fn mutate(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..dice.few(12) {
        once(dice, bytes);
    }
    bytes.truncate(BYTES_MAX);
}

fn once(dice: &mut Dice, bytes: &mut Vec<u8>) {
    let length = bytes.len();
    let at = dice.below(length + 1);
    let run = (dice.below(16) + 1).min(length - at.min(length));
    match dice.below(9) {
        _ if length == 0 => bytes.push(dice.byte()),
        0 => bytes[at.min(length - 1)] ^= 1 << dice.below(8),
        1 => bytes[at.min(length - 1)] = dice.byte(),
        2 => bytes[at.min(length - 1)] = *dice.pick(&[0, 1, 0x7f, 0x80, 250, 251, 252, 253, 254, 255, b'"', b'{', b'}', b'\n']),
        3 => bytes.truncate(at),
        4 => drop(bytes.drain(at..at + run)),
        5 => bytes.insert(at, dice.byte()),
        6 => {
            let copy = bytes[at..at + run].to_vec();
            let to = dice.below(length + 1);
            bytes.splice(to..to, copy);
        }
        7 => {
            let number = dice.integer() as u64;
            let number = &number.to_le_bytes()[..*dice.pick(&[1, 2, 4, 8])];
            let end = (at + number.len()).min(length);
            bytes[at..end].copy_from_slice(&number[..end - at]);
        }
        _ => {
            let times_max = if dice.one_in(10) { 2000 } else { 20 };
            let copy = bytes[at..at + run].repeat(dice.below(times_max));
            bytes.splice(at..at, copy);
        }
    }
}
