"""Operations that are started, and waited for later."""
